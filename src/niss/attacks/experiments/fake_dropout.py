# moved
from niss.attacks.fake_dropout import FakeDropoutExperiment  # noqa: F401
