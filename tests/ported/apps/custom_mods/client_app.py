"""The client of `quickstart_pytorch`, with a mod that writes down its metrics."""

from custom_mods.mods import get_log_mod
from flwr.clientapp import ClientApp
from quickstart_pytorch.client_app import evaluate, train

app = ClientApp(mods=[get_log_mod(".runs_history")])
app.train()(train)
app.evaluate()(evaluate)
