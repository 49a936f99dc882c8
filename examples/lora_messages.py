"""LoRA: 100 people train adapters of a frozen transformer on their messages, dealt out from a Hugging Face dataset.

python examples/lora_messages.py     a quarter of a minute; the picture is lora_messages.png
"""

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from flwr_datasets.partitioner import NaturalIdPartitioner
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import niss

SUBJECTS, DESKS, LENGTH, WIDTH, RANK, PEOPLE = 12, 3, 12, 32, 2, 100


def messages(count):
    """Made up: a subject has ten words of its own, and half of a message is about its subject."""
    subject, other = torch.randint(SUBJECTS, (count,)), torch.randint(SUBJECTS, (count, LENGTH))
    about = torch.where(torch.rand(count, LENGTH) < 0.5, subject[:, None], other)
    return torch.randint(10, about.shape) + 10 * about, subject


class LowRank(nn.Module):  # A layer has W + B A; only A and B are trained (Hu et al. 2021).
    def __init__(self, weight):
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1]) / WIDTH**0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight):
        return weight + self.b @ self.a


torch.manual_seed(1)
block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
subjects = nn.Linear(LENGTH * WIDTH, SUBJECTS)
base = nn.Sequential(nn.Embedding(10 * SUBJECTS, WIDTH), block, nn.Flatten(), subjects)
optimiser = torch.optim.Adam(base.parameters(), lr=0.01)
for _ in range(300):  # The base learns subjects from public messages; yours would come from a file.
    words, subject = messages(64)
    optimiser.zero_grad()
    nn.functional.cross_entropy(base(words), subject).backward()
    optimiser.step()
base.requires_grad_(False)
for layer in (block.linear1, block.linear2):
    register_parametrization(layer, "weight", LowRank(layer.weight))
model = nn.Sequential(base, nn.Linear(SUBJECTS, DESKS))  # Which desk a subject goes to is private.

words, subject = messages(10 * PEOPLE)
person, desk = torch.arange(len(words)) % PEOPLE, subject % DESKS
table = {"words": words.tolist(), "desk": desk.tolist(), "person": person.tolist()}
split = NaturalIdPartitioner(partition_by="person")
split.dataset = Dataset.from_dict(table).with_format("torch")
parts = (split.load_partition(number) for number in range(PEOPLE))
clients = [(part["words"][:], part["desk"][:]) for part in parts]
words, subject = messages(1000)
training = {"participants": 50, "epochs": 2, "batch_size": 5, "learning_rate": 0.1}
methods = [{"name": name} for name in ("fedavg", "niss", "dp-fedavg")]
settings = {"rounds": 10, "training": training, "privacy": {"epsilon": 3.0, "clip": 0.3}, "methods": methods}
config, test = niss.make_config(settings), (words, subject % DESKS)
plt.figure(figsize=(7, 3.4), layout="constrained")
for result in niss.compare(config, model=model, clients=clients, test=test).results:
    plt.plot(range(1, 11), [100 * one.accuracy for one in result.rounds], label=result.label)
    print(f"{result.label:10} {result.accuracy:.1%}")
trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
plt.title(f"100 people train {trained} numbers of a transformer, epsilon 3", loc="left")
plt.gca().set(xlabel="round", ylabel="messages to the right desk, %", ylim=(0, 100))
plt.legend(loc="center right", frameon=False)
plt.savefig("lora_messages.png", dpi=150)
