"""Client steps per second of FedJAX on three small models: 10 of 100 clients a round, 600 random 28x28 images each.

    jax-env/bin/python benchmarks/others/fedjax_rounds.py lr mlp cnn --rounds 12        (in FedJAX's environment)

Every client takes 50 steps of batch 10; the median round after the first four counts. One JSON object is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # fedjax 0.0.17 asks for it by its old name

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

CLIENTS, IMAGES, COHORT, STEPS, BATCH, WARM = 100, 600, 10, 50, 10, 4


def dense(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    scale = inputs**-0.5
    return {
        "w": jnp.asarray(rng.uniform(-scale, scale, (inputs, outputs)).astype(np.float32)),
        "b": jnp.zeros(outputs, jnp.float32),
    }


def filters(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    scale = (25 * inputs) ** -0.5
    return {
        "w": jnp.asarray(rng.uniform(-scale, scale, (5, 5, inputs, outputs)).astype(np.float32)),
        "b": jnp.zeros(outputs, jnp.float32),
    }


def start(name: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    if name == "lr":
        return [dense(rng, 784, 10)]
    if name == "mlp":
        return [dense(rng, 784, 200), dense(rng, 200, 10)]
    return [filters(rng, 1, 32), filters(rng, 32, 64), dense(rng, 1024, 512), dense(rng, 512, 10)]


def scores(parts: list[dict[str, Any]], x: Any) -> Any:
    convolutions = [part for part in parts if part["w"].ndim == 4]
    for part in convolutions:
        x = jax.lax.conv_general_dilated(
            x, part["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        x = jax.lax.reduce_window(
            jax.nn.relu(x + part["b"]), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
    x = x.reshape(len(x), -1)
    layers = parts[len(convolutions) :]
    for i, part in enumerate(layers):
        x = x @ part["w"] + part["b"]
        x = jax.nn.relu(x) if i + 1 < len(layers) else x
    return x


def loss(parts: list[dict[str, Any]], batch: Any, rng: Any) -> Any:
    each = jax.nn.log_softmax(scores(parts, batch["x"]))
    return -jnp.mean(jnp.take_along_axis(each, batch["y"][:, None], 1))


def rate(name: str, rounds: int) -> float:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((CLIENTS, IMAGES, 28, 28, 1), dtype=np.float32)
    y = rng.integers(0, 10, (CLIENTS, IMAGES))
    clients = [fedjax.ClientDataset({"x": x[i], "y": y[i]}) for i in range(CLIENTS)]
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(0.01),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_steps=STEPS),
    )
    state = algorithm.init(start(name))
    laps = []
    for number in range(rounds + WARM):
        keys = jax.random.split(jax.random.PRNGKey(number), COHORT)
        cohort = rng.choice(CLIENTS, COHORT, replace=False)
        began = time.perf_counter()
        state, _ = algorithm.apply(state, [(b"%d" % i, clients[i], keys[k]) for k, i in enumerate(cohort)])
        jax.block_until_ready(state.params)
        laps.append(time.perf_counter() - began)
    return float(COHORT * STEPS / np.median(laps[WARM:]))


def main() -> None:
    parser = argparse.ArgumentParser(description="client steps per second of FedJAX")
    parser.add_argument("models", nargs="+", choices=["lr", "mlp", "cnn"])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    rates = {name: rate(name, args.rounds) for name in args.models}
    print(json.dumps({"rates": rates, "versions": {name: version(name) for name in ("fedjax", "jax", "jaxlib")}}))


if __name__ == "__main__":
    main()
