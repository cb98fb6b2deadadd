"""`offbeat serve`, `join` and `keys`: the same method over a real network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offbeat.cli.flags import Device, Json, Overwrite, Sets, Until, experiment_of
from offbeat.cli.output import show_json, show_outcome, show_table, writing
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.live.transport import Keys

KeysFolder = Annotated[Path | None, typer.Option("--keys", help="Folder with certificates: `offbeat keys make`.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain text without certificates; on a loopback address only.")]
LogFile = Annotated[
    Path | None, typer.Option("--log", help="File for structured logs (JSON lines); else standard error.")
]


def require_extra() -> None:
    """The packages of the extra `live`."""
    from importlib.util import find_spec

    missing = [name for name in ("grpc", "cryptography", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError([f"this needs {', '.join(missing)}, which is not installed: pip install 'offbeat[live]'"])


def keys_of(keys: Path | None, name: str, plain: bool) -> Keys | None:
    from offbeat.live.transport import Keys

    if (keys is None) != plain:
        raise ConfigError(
            ["give --keys FOLDER with certificates (`offbeat keys make FOLDER`), or --plain: plain text, on loopback"]
        )
    return None if keys is None else Keys(keys, name)


def serve(
    config: Annotated[Path, typer.Argument(help="A TOML file, as `offbeat run` takes it.")],
    out: Annotated[Path, typer.Option(help="Run directory; an unfinished live run there is gone on with.")],
    address: Annotated[str, typer.Option(help="host:port to listen on; port 0 takes a free one.")] = "127.0.0.1:7070",
    keys: KeysFolder = None,
    plain: Plain = False,
    allow: Annotated[
        Path | None,
        typer.Option(
            help="File with the certificates' names of the clients, one a line; left out: client-0, client-1, ..."
        ),
    ] = None,
    start_with: Annotated[
        int | None, typer.Option(help="Begin when so many clients are there; else all.", min=1)
    ] = None,
    heartbeat: Annotated[float, typer.Option(help="Seconds between two signs of life.")] = 5.0,
    lease: Annotated[float, typer.Option(help="Seconds that a client which is cut off keeps its place.")] = 30.0,
    limits: Annotated[
        list[str] | None, typer.Option("--limit", help="A limit of docs/live.md, e.g. norm=100; repeatable.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="host:port for /health and /metrics, e.g. 127.0.0.1:9090; left out: none.")
    ] = None,
    metrics_open: Annotated[
        bool, typer.Option("--metrics-open", help="Let --metrics listen beyond the loopback.")
    ] = False,
    log: LogFile = None,
    until: Until = None,
    sets: Sets = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Serve a run to live clients. Killed and started again, it goes on where it was.

    Example: offbeat serve examples/live.toml --keys keys --address 0.0.0.0:7070 --out runs/live
    """
    require_extra()
    experiment = experiment_of(config, {"device": device}, sets, until)
    from offbeat.cli.flags import assignment
    from offbeat.live.checks import Limits
    from offbeat.live.operations import Operations, start_log
    from offbeat.live.serve import Options
    from offbeat.live.serve import serve as serve_run

    names = None if allow is None else read_names(allow)
    options = Options(
        address, keys_of(keys, "server", plain), names, start_with, heartbeat, lease,
        Limits.of(dict(assignment("--limit", text) for text in limits or [])),
    )  # fmt: skip
    start_log(log)
    operations = Operations(metrics, metrics_open, view=sys.stderr.isatty() and not as_json)

    def listening(server: Any) -> None:
        print(f"offbeat: listening on port {server.port}, run {server.run_id}", file=sys.stderr)
        operations.watch(server)

    try:
        outcome = serve_run(experiment, out, options, None, listening, overwrite)
    finally:
        operations.close()
    show_outcome(outcome, as_json, out)


def join(
    address: Annotated[str, typer.Argument(help="host:port of the server.")],
    data: Annotated[
        str,
        typer.Option(
            help="This client's samples: an npz with x and y, module:function that gives (x, y) or a Task, or `task`, "
            "its own part of the task that the server names."
        ),
    ],
    keys: KeysFolder = None,
    name: Annotated[str | None, typer.Option(help="Name of this client's certificate in --keys.")] = None,
    plain: Plain = False,
    client: Annotated[int, typer.Option(help="Number of this client, with --plain only.")] = -1,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for what this client remembers between jobs; needed by SCAFFOLD and the like."),
    ] = None,
    code: Annotated[
        list[str] | None, typer.Option(help="module:function of yours that the experiment may name; repeatable.")
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Local steps of a job where the method leaves them to the client.", min=1)
    ] = None,
    step_seconds: Annotated[float, typer.Option(help="Wait out so many seconds for each local step.", min=0.0)] = 0.0,
    patience: Annotated[float, typer.Option(help="Seconds to look for a server that is not there.", min=0.0)] = 600.0,
    listen: Annotated[
        str | None, typer.Option(help="host:port where neighbours find this device; needed by methods with clusters.")
    ] = None,
    device: Device = None,
    log: LogFile = None,
    as_json: Json = False,
) -> None:
    """Take part in a live run with data of one's own.

    Example: offbeat join server.example:7070 --data shard.npz --keys keys --name client-3
    """
    require_extra()
    shown = keys_of(keys, name or "", plain)
    if shown is not None and not name:
        raise ConfigError(["give --name, the name of this client's certificate in --keys"])
    if shown is None and client < 0:
        raise ConfigError(["with --plain give --client, the number of this client"])
    from offbeat.live.join import join as join_run
    from offbeat.live.operations import start_log

    start_log(log)
    done = join_run(
        address, data, keys, name, client, device=device or "auto", state=state, code=tuple(code or ()),
        local_steps=local_steps, step_seconds=step_seconds, patience=patience, listen=listen,
    )  # fmt: skip
    if as_json:
        show_json(done)
    else:
        print(f"client {done['client']}: {done['accepted']} updates taken, {done['jobs']} jobs; ended: {done['ended']}")


def read_names(file: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--allow {file} cannot be read: {error}"]) from None
    return tuple(line for line in lines if line and not line.startswith("#"))


def keys(
    action: Annotated[Literal["make", "renew", "revoke", "list"], typer.Argument(help="make, renew, revoke or list.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the certificates.")],
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of clients; for renew and revoke also `server`.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Make client-0, client-1, ... up to so many.", min=0)] = 0,
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the server; repeatable.")] = None,
    days: Annotated[float, typer.Option(help="How long certificates are good for.")] = 365.0,
    as_json: Json = False,
) -> None:
    """Certificates: a CA, the server and each client; private keys are readable by their owner only.

    Example: offbeat keys make keys --host server.example --clients 6
    """
    require_extra()
    from offbeat.live import certificates

    chosen = [*(names or []), *(f"client-{number}" for number in range(clients))]
    if action == "make":
        new = [name for name in chosen if name in (names or []) or not (folder / f"{name}.pem").exists()]
        certificates.make(folder, new, host or (), days)
    elif action != "list":
        if not chosen:
            raise ConfigError([f"offbeat keys {action}: give the names whose certificates are meant"])
        for name in chosen:
            certificates.renew(folder, name, host or (), days) if action == "renew" else certificates.revoke(
                folder, name
            )
    rows = [certificate_row(each) for each in certificates.issued(folder)]
    if as_json:
        show_json({"certificates": rows})
        return
    show_table(str(folder), ("name", "good until", "state"), [list(map(str, row.values())) for row in rows])


def certificate_row(one: Any) -> dict[str, str]:
    state = "revoked" if one.revoked else "expired" if one.expired else "good"
    return {"name": one.name, "until": one.until.isoformat(timespec="seconds"), "state": state}


def from_run(
    run: Annotated[Path, typer.Argument(help="Directory of a live run that has ended.")],
    out: Annotated[Path, typer.Option(help='The fleet\'s file, for fleet = {name = "recorded", file = ...}.')],
    as_json: Json = False,
) -> None:
    """Fit speeds, links and presence of the clients of a live run, to compare other methods on them.

    Example: offbeat fleet from-run runs/live --out fleet.json
    """
    require_extra()
    with writing(out, ".json"):
        from offbeat.live.fit import write

        fit = write(run, out)
    if as_json:
        show_json(
            {name: fit[name] for name in ("clients", "error", "observed", "jitter", "drop_out")} | {"out": str(out)}
        )
        return
    for name, error in fit["error"].items():
        print(f"{name}: {fit['observed'][name]} observed, the middle one {error:.1%} from its client's median")
    print(f"jitter {fit['jitter']:.3f}, jobs lost {fit['drop_out']:.1%}; wrote {out}")
