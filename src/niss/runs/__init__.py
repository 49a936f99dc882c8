"""What is left of a run: a record of each round, and the folder that holds them; neither torch nor Flower is needed."""

from niss.runs.folder import RunFolder
from niss.runs.records import RoundRecord, SumNoise

__all__ = ["RoundRecord", "RunFolder", "SumNoise"]
