# moved
from niss.attacks.invert import InvertExperiment

draw_batches = InvertExperiment().draw
