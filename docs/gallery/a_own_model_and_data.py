"""
Your own model and data
=======================

A task is a model, a loss, tensors and who has which samples. Nearly any ``nn.Module`` will do; it is written for one
client, and the engine computes many clients at once.
"""

import torch
from torch import nn

from offbeat import Experiment, Task, run

# %%
# Three classes in the plane, spread over forty clients that each see mostly one of them.

torch.manual_seed(0)
y = torch.arange(1200) % 3
x = torch.randn(1200, 2) + 2.2 * torch.stack([torch.cos(2.1 * y), torch.sin(2.1 * y)], dim=1)
order = torch.argsort(y + 0.8 * torch.rand(1200))
shards = [order[30 * i : 30 * i + 30].tolist() for i in range(40)]

model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
task = Task(model, nn.functional.cross_entropy, (x, y), shards, test=(x, y), name="three classes")

# %%
# A run needs a method, a fleet and a limit. Time is virtual: the fleet says what steps and transfers take.

done = run(
    Experiment(
        method={"name": "fedbuff", "buffer_size": 5, "client_lr": 0.1},
        task=task,
        fleet="straggling",
        until={"virtual_seconds": 4.0},
        evaluate={"every_seconds": 0.2},
        device="cpu",
    )
)
print(f"accuracy {done.accuracy_final:.3f} after {done.commits} commits; staleness {done.staleness['mean']:.1f}")

# %%
# The weights are those that ``load_state_dict`` takes.

model.load_state_dict(done.model)
print(model(torch.tensor([[2.0, 0.0]])).softmax(dim=1).detach())
