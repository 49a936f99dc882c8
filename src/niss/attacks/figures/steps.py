# moved
from matplotlib.figure import Figure

from niss.attacks import load_experiment
from niss.attacks.experiment import Findings


def draw_steps(findings: Findings) -> Figure | None:
    """For the old command line only: each experiment draws its own figure now."""
    return load_experiment(findings.attack)().draw(findings)
