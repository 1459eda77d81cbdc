"""Training ends where torch's ends from the same initial weights, data, loss and optimizer.

Slow, and needs torch: ``pytest -m slow tests/nn/test_against_torch.py``.
"""

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.nn.network import DenseNetwork, build
from daskps.nn.optimizer import DenseOptimizer

pytestmark = pytest.mark.slow
STEPS, EXAMPLES = 60, 1000


def torch_model(network: DenseNetwork) -> object:
    """The same network, with the same weights, as a torch module over the inputs side by side."""
    torch = pytest.importorskip("torch")
    shape, layers = network.architecture, []
    sizes = [shape.inputs.width, *shape.hidden, 1]
    for i in range(len(sizes) - 1):
        layers += [torch.nn.Linear(sizes[i], sizes[i + 1]), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    names = [(f"hidden{i}.weight", f"hidden{i}.bias") for i in range(len(shape.hidden))]
    names += [("output.weight" if shape.hidden else "linear.weight", "bias")]
    with torch.no_grad():
        for layer, (weight, bias) in zip(model[::2], names, strict=True):
            layer.weight.copy_(torch.from_numpy(np.atleast_2d(network.parameters[weight].T)))
            layer.bias.copy_(torch.from_numpy(network.parameters[bias]))
    return model


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("hidden", [(), (32, 16)], ids=["lr", "dnn"])
def test_training_follows_torch(kind: str, hidden: tuple[int, ...], pool: ComputePool) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    truth = random.normal(size=24)
    dense = random.normal(size=(STEPS, EXAMPLES, 24)).astype(np.float32)
    labels = (random.random((STEPS, EXAMPLES)) < 1 / (1 + np.exp(-dense @ truth))).astype(np.float32)
    ours = DenseOptimizer(kind, 0.05, clip_norm=0.3)
    name, device = "dnn" if hidden else "lr", CpuDevice(0, pool)
    network = build(name, tables=[], dense_features=24, hidden=hidden, seed=1, device=device, optimizer=ours)
    model = torch_model(network)
    theirs = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=ours.epsilon),
        "adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=ours.epsilon),
    }[kind](model.parameters())
    for step in range(STEPS):
        result = network.step(pooled=[], dense=dense[step], labels=labels[step])
        network.apply(result.sums)
        theirs.zero_grad()
        logits = model(torch.from_numpy(dense[step]))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels[step]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        theirs.step()
        assert result.loss[0] / result.weight[0] == pytest.approx(float(loss.detach()), rel=1e-3)
    with torch.no_grad():
        wanted = model(torch.from_numpy(dense[0]))[:, 0].numpy()
    found = network.predict(pooled=[], dense=dense[0])
    assert np.abs(found - wanted).mean() < 0.005 * np.abs(wanted).mean()
