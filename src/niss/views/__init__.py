"""What an adversary sees and what it cannot know: pure linear algebra over share graphs.

The joint view (`effective_variance`) is that of a server that holds every upload; `worst_case` bounds what the worst
colluders leave a client; `calibrate_for` turns both around and gives the noise a target needs.
`run_mu2` is the joint view over a whole training in which noise is carried from round to round.
"""

from niss.views.collusion import (
    Corruption,
    WorstCase,
    calibrate_for,
    colluding_neighbours,
    expected_bound,
    worst_case,
)
from niss.views.joint import effective_variance
from niss.views.numerics import EXACT_LIMIT, exact_limit
from niss.views.run import CompleteRun, RoundNoise, RunNoise, run_mu2
