"""Silos: six hospitals learn which of four illnesses a patient has, and hide every single patient.

python examples/silos_tables.py     about fifteen seconds; the picture is silos_tables.png
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_classification

import niss

SIZES = (900, 600, 400, 300, 200, 100)  # Patients of each hospital; the tables are made up.
METHODS = {
    "fedavg": "no privacy",
    "central-dp": "one curator is trusted with all",
    "niss": "niss: nobody is trusted",
    "dp-fedavg": "each adds all the noise itself",
    "alone": "the largest hospital alone",
}

measured, illness = make_classification(
    3000, 20, n_informative=12, n_classes=4, n_clusters_per_class=1, class_sep=1.2, random_state=1
)
measured = (measured / 3.0).astype(np.float32)  # A public scale: private means would cost privacy.
test = measured[2500:], illness[2500:]
# Each hospital sees two illnesses more often than the others.
order = np.argsort(illness[:2500] + np.random.default_rng(1).normal(scale=0.7, size=2500))
hospitals = [(measured[part], illness[part]) for part in np.split(order, np.cumsum(SIZES)[:-1])]

config = niss.make_config(
    {
        "rounds": 40,
        "data": {"silos": len(hospitals)},
        "training": {"server_rate": 0.5, "server_optimizer": "momentum"},
        "privacy": {"unit": "record", "batch": 0.2, "clip": 1.0, "epsilon": 0.5},
        "methods": [{"name": name} for name in METHODS],
    }
)
torch.manual_seed(1)
comparison = niss.compare(config, model=torch.nn.Linear(20, 4), clients=hospitals, test=test)

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
names = [METHODS[result.label] for result in comparison.results]
accuracy = [100 * result.accuracy for result in comparison.results]
axes.barh(names, accuracy, color=["grey", "grey", "tab:green", "tab:orange", "tab:orange"])
axes.bar_label(axes.containers[0], fmt="%.1f %%", padding=-50, color="white")
axes.invert_yaxis()
axes.set(xlabel="test patients diagnosed rightly, %", xlim=(0, 100))
axes.set_title("Six hospitals, epsilon 0.5 for every patient", loc="left")
figure.savefig("silos_tables.png", dpi=150)
print(*(f"{name:34} {each:.1f} %" for name, each in zip(names, accuracy, strict=True)), sep="\n")
print(next(result for result in comparison.results if result.label == "niss").statement.words)
