# moved
from niss.attacks.fake_dropout import FakeDropoutExperiment

draw_stories = FakeDropoutExperiment().draw
