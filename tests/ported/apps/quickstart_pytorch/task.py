"""Digits of 8 x 8 pixels, dealt out evenly, and a small convolutional network."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

Data = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.fc1 = nn.Linear(6 * 3 * 3, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.max_pool2d(functional.relu(self.conv1(inputs)), 2)
        return self.fc2(functional.relu(self.fc1(hidden.flatten(1))))


def digits() -> Data:
    inputs, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return torch.from_numpy(inputs / 16).float().view(-1, 1, 8, 8)[order], torch.from_numpy(labels)[order]


def load_data(partition: int, partitions: int) -> tuple[Data, Data]:
    """What this client trains on, and the fifth that it tests on; the last 357 digits are the server's."""
    inputs, labels = (one[:1440][partition::partitions] for one in digits())
    cut = int(0.8 * len(labels))
    return (inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:])


def load_centralized_dataset() -> Data:
    inputs, labels = digits()
    return inputs[1440:], labels[1440:]


def train(net: nn.Module, data: Data, epochs: int, rate: float) -> float:
    """The mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    net.train()
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in zip(data[0].split(32), data[1].split(32), strict=True):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and accuracy."""
    net.eval()
    scores = net(data[0])
    right = (scores.argmax(1) == data[1]).float().mean()
    return functional.cross_entropy(scores, data[1]).item(), right.item()
