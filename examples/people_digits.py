"""People: 300 of them hold five handwritten digits each, and teach a model to read without trusting the server.

python examples/people_digits.py     about ten seconds; the picture is people_digits.png
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import niss

PEOPLE, EACH = 300, 5
METHODS = {
    "fedavg": "no privacy",
    "central-dp": "a trusted server adds noise",
    "niss": "niss: noise cancels, nobody is trusted",
    "dp-fedavg": "everyone adds noise",
}

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(1).permutation(len(labels))
images, labels = (images[order] / 16.0).astype(np.float32), labels[order]
parts = [slice(EACH * person, EACH * (person + 1)) for person in range(PEOPLE)]
people = [(images[part], labels[part]) for part in parts]
test = images[EACH * PEOPLE :], labels[EACH * PEOPLE :]  # Digits of nobody's.

config = niss.make_config(
    {
        "rounds": 12,
        "training": {"participants": 150, "epochs": 2, "batch_size": EACH, "learning_rate": 0.5},
        "privacy": {"epsilon": 3.0, "clip": 1.0},
        "methods": [{"name": name} for name in METHODS],
    }
)
torch.manual_seed(1)
comparison = niss.compare(config, model=torch.nn.Linear(64, 10), clients=people, test=test)

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for result in comparison.results:
    accuracy = [100 * one.accuracy for one in result.rounds]
    axes.plot(range(1, len(accuracy) + 1), accuracy, label=METHODS[result.label])
    print(f"{METHODS[result.label]:40} {accuracy[-1]:.1f} %")
axes.set(xlabel="round", ylabel="digits read rightly, %", ylim=(0, 100))
axes.set_title("300 people, epsilon 3 for each of them", loc="left")
axes.legend(loc="center right", frameon=False)
figure.savefig("people_digits.png", dpi=150)
niss_result = next(result for result in comparison.results if result.label == "niss")
print(niss_result.statement.words)
