# moved
from niss.attacks.pictures import (  # noqa: F401
    PictureScores,
    best_order,
    blind_guess,
    score_pictures,
    structural_similarity,
)
