# moved
from niss.attacks.collude import ColludeExperiment

draw_collusion = ColludeExperiment().draw
