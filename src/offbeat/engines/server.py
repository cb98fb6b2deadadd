"""The server of a run: its state, the versions that jobs still start from, commits, what it keeps of each client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat import keys
from offbeat.config.choices import Choice
from offbeat.engines.memory import Memory
from offbeat.errors import BadNumbers, OffbeatError
from offbeat.method import Cohort, Method, State, Update
from offbeat.records import Begun

Sums: TypeAlias = Callable[[Mapping[str, Tensor]], Update]  # from weights [n] by name to sums [d]

FEW = 4  # versions that are not worth looking through


def finite(vectors: Iterable[Tensor]) -> bool:
    """Whether all numbers are. Their sum takes one look at them; where it is not finite, perhaps for its size alone,
    each is looked at."""
    return all(math.isfinite(vector.sum()) or bool(vector.isfinite().all()) for vector in vectors)


class Server:
    """The state after the last commit, and what each version broadcast. `sizes` are the samples of each client;
    `members` the clients behind whoever reports (None: each for itself)."""

    def __init__(
        self, method: Method, model: Tensor, seed: int, sizes: Sequence[int],
        members: Sequence[Sequence[int]] | None, choice: Choice = "auto",
    ) -> None:  # fmt: skip
        self.method, self.seed, self.sizes, self.members = method, seed, list(sizes), members
        self.device, self.dtype = model.device, model.dtype
        self.version = 0
        self.state: State = method.what.init(model)
        self.kept: Memory | None = None
        if method.what.keeps:
            shapes = dict.fromkeys(method.what.keeps, (len(model), model.dtype))
            self.kept = Memory(shapes, len(sizes), model.device, choice)
        self.versions: dict[int, State] = {0: self.broadcast()}

    @property
    def units(self) -> int:
        """Who reports: clients, or clusters."""
        return len(self.sizes if self.members is None else self.members)

    @property
    def model(self) -> Tensor:
        """The newest version."""
        return self.state["model"]

    def set_model(self, model: Tensor) -> None:
        """Begin from another model."""
        self.state = {**self.state, "model": model}

    def set_size(self, client: int, samples: int) -> None:
        """A client says how many samples it has."""
        self.sizes[client] = samples

    def keep(self, clients: Tensor, gradients: Tensor) -> None:
        """Begin what is kept of clients with their gradients."""
        if self.kept is not None:
            self.kept.write(clients, dict.fromkeys(self.method.what.keeps, gradients))

    def broadcast(self) -> State:
        return self.method.what.broadcast(self.state, keys.key(self.seed, "broadcast", self.version))

    def prime(self, mean: Tensor) -> None:
        """Begin from the clients' gradients at version 0."""
        assert self.method.what.prime is not None
        self.state = self.method.what.prime(self.state, mean)
        self.versions = {0: self.broadcast()}

    def cohort(
        self, clients: Sequence[int], staleness: Sequence[int], steps: Sequence[int], version: int | None = None
    ) -> Cohort:
        """Of a commit now, or of the one that will replace that version."""
        version = self.version if version is None else version
        behind = [[client] for client in clients] if self.members is None else [self.members[c] for c in clients]
        samples, devices = [sum(self.sizes[i] for i in each) for each in behind], [len(each) for each in behind]
        columns = torch.tensor([staleness, steps, samples, devices], dtype=self.dtype)
        numbers = torch.tensor(clients).to(self.device, non_blocking=True)
        stale, counts, shards, many = columns.to(self.device, non_blocking=True)
        whole, key = (len(self.sizes), sum(self.sizes), self.units), keys.key(self.seed, "commit", version)
        return Cohort(stale, counts, shards, numbers, many, version, *whole, key, {})

    def commit(self, jobs: Sequence[Begun], updates: Update, sums: Sums | None = None) -> list[int]:
        """The next version, from a row of all that was sent for each of the jobs; and how stale each update was. With
        `sums`, which adds the vectors up by weights, the rows of `updates` are those of numbers alone."""
        rule = self.method.what
        staleness = [self.version - job.version for job in jobs]
        cohort = self.cohort([job.client for job in jobs], staleness, [job.steps for job in jobs])
        cohort = cohort._replace(numbers={name: updates[name] for name in rule.local.numbers})
        if sums is not None:
            assert rule.apply is not None
            state = rule.apply(self.state, sums(rule.weights(cohort)), cohort)
        else:
            updates = {name: updates[name] for name in rule.local.sends}
            if self.kept is not None:
                updates |= self.kept.read(rule.keeps, cohort.client)
            state = rule.renew(self.state, updates, cohort)
        kept = {name: state.pop(name) for name in rule.keeps}
        state = self.same_vectors(state)
        if self.device.type == "cpu" and not finite((*state.values(), *kept.values())):
            raise BadNumbers(self.complaint(self.version + 1))
        if self.kept is not None:
            self.kept.write(cohort.client, kept)
        self.state = state
        self.version += 1
        self.versions[self.version] = self.broadcast()
        return staleness

    def same_vectors(self, state: Any) -> State:
        """What a commit gave, if it is a state of the same vectors."""
        want = {name: tuple(t.shape) for name, t in self.state.items()}
        given = {name: tuple(t.shape) for name, t in state.items()} if isinstance(state, dict) else type(state).__name__
        if given != want:
            raise OffbeatError(f"method '{self.method.name}': its commit must give the vectors {want}; it gave {given}")
        return state  # type: ignore[no-any-return]

    def made_finite(self, version: int) -> bool:
        """Whether the commit that made a version gave finite numbers, as far as clients were told. On a GPU it is asked
        when clients that start from it fail: to ask at every commit would mean to wait for it."""
        told = self.versions.get(version)
        return not version or told is None or self.method.what.down is not None or finite(told.values())

    def complaint(self, version: int) -> str:
        """The sentence on a commit that gave bad numbers."""
        ways = "`weigh` or `apply`" if self.method.what.apply is not None else "`commit`"
        return (
            f"method '{self.method.name}': commit {version} gives numbers that are not finite, though every update "
            f"that went into it was finite. The run stopped at commit {self.version}. Look in its {ways} for "
            "quotients, roots and logarithms; where numbers have grown too large, a lower client or server rate helps."
        )

    def forget(self, needed: Callable[[int], bool]) -> None:
        """Let go of versions that no job has to start from any more."""
        if len(self.versions) < FEW:
            return
        for version in [v for v in self.versions if v != self.version and not needed(v)]:
            del self.versions[version]

    # ---- checkpoints ----------------------------------------------------------------------------
    def save(self) -> dict[str, Tensor]:
        tensors = {f"server/{name}": t for name, t in self.state.items()}
        for version, state in self.versions.items():
            tensors |= {f"version/{version}/{name}": t for name, t in state.items()}
        return tensors | ({} if self.kept is None else self.kept.save())

    def restore(self, tensors: dict[str, Tensor], version: int) -> None:
        state = {name.split("/", 1)[1]: t.to(self.device) for name, t in tensors.items() if name.startswith("server/")}
        shapes = [{name: t.shape for name, t in vectors.items()} for vectors in (state, self.state)]
        if shapes[0] != shapes[1]:
            raise OffbeatError(f"the checkpoint holds {shapes[0]}, this method and model need {shapes[1]}")
        self.state, self.version, self.versions = state, version, {}
        for name, t in tensors.items():
            kind, *where = name.split("/")
            if kind == "version":
                self.versions.setdefault(int(where[0]), {})[where[1]] = t.to(self.device)
        if version not in self.versions:
            self.versions[version] = self.broadcast()
        if self.kept is not None:
            self.kept.restore(tensors)
