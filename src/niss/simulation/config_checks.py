"""Settings that do not go together, refused before any work starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from niss.data.catalog import find_spec
from niss.errors import ConfigError, PrivacyError
from niss.simulation.clipping import adaptive_clip

if TYPE_CHECKING:
    from niss.simulation.config import Config
    from niss.simulation.sections import DataConfig, MethodConfig, TrainingConfig


def check_consistency(config: Config) -> None:
    """Raise ValueError("field: fault; fix") for the first fault that no single key shows.

    That is how a validator of pydantic speaks; `make_config` turns it into a `ConfigError`.
    """
    _check_data(config.data)
    _check_training(config)
    _check_titles(config.methods)
    if config.exchange == "protocol":
        _check_protocol(config)
    if config.privacy.colluders > config.training.participants - 2:
        raise ValueError(
            f"privacy.colluders: {config.privacy.colluders} of {config.training.participants} participants leave "
            "nobody to share noise with; assume fewer, or let more take part"
        )
    for method in config.methods:
        _check_method(config, method)


def _check_data(data: DataConfig) -> None:
    """Whether the samples of the dataset can be dealt out like that."""
    spec = find_spec(data.dataset)
    if data.split == "natural":
        if spec is not None and spec.clients is None:
            raise ValueError(
                f"data.split: the samples of {spec.name} belong to nobody; use iid, shards or dirichlet"
            )
        if spec is not None and spec.clients is not None and data.clients > spec.clients:
            raise ValueError(
                f"data.clients: {spec.name} has {spec.clients} clients, not {data.clients}; lower it, or leave it out "
                "for all of them"
            )
    elif spec is not None and spec.kind == "tokens":
        raise ValueError(
            f"data.split: a sample of {spec.name} has no label of its own to deal it out by; use natural"
        )


def _check_training(config: Config) -> None:
    """Numbers of clients, and the units and mechanisms that ask something of training."""
    clients, training, privacy = config.data.clients, config.training, config.privacy
    if training.participants > clients:
        spec = find_spec(config.data.dataset)
        everyone = config.data.split == "natural" and spec is not None and clients == spec.clients
        raise ValueError(
            f"training.participants: {training.participants} in a round, but there are only {clients} clients; "
            + ("lower it" if everyone else "lower it or raise data.clients")
        )
    if isinstance(privacy.epsilon, tuple) and len(privacy.epsilon) != clients:
        raise ValueError(f"privacy.epsilon: {len(privacy.epsilon)} values for {clients} clients")
    if privacy.unit == "record" and training.epochs != 1:
        raise ValueError(
            "training.epochs: the record unit takes one local step a round; set it to 1 and raise rounds"
        )
    _check_sampling(config)
    _check_server(config.training)
    if privacy.mechanism == "classical" and not privacy.allow_invalid:
        largest = max(privacy.epsilon) if isinstance(privacy.epsilon, tuple) else privacy.epsilon
        if largest >= 1.0:
            raise ValueError(
                f"privacy.mechanism: classical is proved only for epsilon < 1, not {largest:g}; use analytic, or "
                "allow_invalid = true to reproduce the paper without a guarantee"
            )


def _check_sampling(config: Config) -> None:
    """Whether participants can be drawn like that, and rest as long as they should."""
    training, clients = config.training, config.data.clients
    for sampling in {training.sampling, *(config.sampling_of(method) for method in config.methods)}:
        if sampling == "cyclic" and clients % training.participants:
            raise ValueError(
                f"training.participants: {clients} clients do not make whole cohorts of {training.participants}, which "
                "take part in turn; choose a number that divides them, or data.clients = "
                f"{clients - clients % training.participants}"
            )
        if sampling == "poisson" and training.weights != "equal":
            raise ValueError(
                "training.weights: with poisson sampling a weight may not depend on who else takes part; use equal"
            )
    least = training.separation
    if least is None:
        return
    if training.sampling not in ("cyclic", "uniform"):
        raise ValueError(
            f"training.separation: {training.sampling} sampling may choose a client again in the next round; use "
            "sampling = 'cyclic' or 'uniform'"
        )
    if least * training.participants > clients:
        raise ValueError(
            f"training.separation: {least} cohorts of {training.participants} in a row are more than {clients} "
            f"clients; ask for at most {clients // training.participants}"
        )


def _check_server(training: TrainingConfig) -> None:
    """Settings that the server's optimiser does not have."""
    chosen, unused = training.server_optimizer, set[str]()
    if chosen == "sgd":
        unused = {"server_momentum", "server_beta2", "server_epsilon"}
    elif chosen == "momentum":
        unused = {"server_beta2", "server_epsilon"}
    for name in sorted(unused):
        if getattr(training, name) is not None:
            raise ValueError(
                f"training.{name}: server_optimizer = {chosen!r} has none; leave it out, or choose another optimiser"
            )


def _check_titles(methods: tuple[MethodConfig, ...]) -> None:
    """Every method has a folder of its own, called by its title."""
    titles = [method.title for method in methods]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"methods: two are called {title!r}; give each its own label")
        if not title or title in (".", "..") or any(sign in title for sign in "/\\\0"):
            raise ValueError(f"methods: {title!r} cannot be the name of a folder; give it another label")


def _check_method(config: Config, method: MethodConfig) -> None:
    """Distortion, tau^2 and graph of one method."""
    clients = config.data.clients
    if isinstance(method.tau2, tuple) and len(method.tau2) != clients:
        raise ValueError(f"methods.tau2: {len(method.tau2)} values for {clients} clients")
    distortion = method.distorts
    if method.tau2 == "calibrated" and distortion is not None and not distortion.calibratable:
        raise ValueError(
            f"methods.tau2: only the additive distortion can be calibrated, not {method.distortion}; "
            "give a number, or use distortion = 'additive'"
        )
    repairing = config.protocol.dropout > 0.0 and config.protocol.mode == "repair"
    if repairing and distortion is not None and not distortion.repairable:
        raise ValueError(
            f"methods.distortion: shares that a client has multiplied ({method.distortion!r}) cannot be "
            "taken out of a sum again; use distortion = 'additive', or protocol.mode = 'tolerate'"
        )
    if method.graph == "coalition" and not method.groups:
        raise ValueError("methods.groups: a coalition graph needs them, for example [[0, 1, 2], [3, 4, 5]]")
    _check_whole_run(config, method)
    _check_quantile(config, method)
    try:
        adaptive_clip(config, method)
        plan = config.plan(method)
        if plan.participants is not None:
            plan.committed(plan.participants)
    except (ConfigError, PrivacyError) as error:
        raise ValueError(error.message + (f"; {error.hint}" if error.hint else "")) from None
    _check_threshold(config, method)


def _check_whole_run(config: Config, method: MethodConfig) -> None:
    """Methods that plan their noise for all rounds promise nothing for one of them alone."""
    privacy = config.privacy
    if method.kind.whole_run and privacy.scope != "training":
        raise ValueError(
            f"privacy.scope: the claim of {method.name} is about the whole training; use scope = 'training'"
        )
    if method.kind.secret_draw and privacy.participations is not None:
        raise ValueError(
            f"privacy.participations: a cap would make the secret draw of {method.name} depend on the past; leave it "
            "out"
        )
    if method.kind.carries and config.training.weights != "equal":
        raise ValueError(
            f"training.weights: {method.name} takes out in a round what clients of the one before added, so that all "
            "have to weigh the same; use equal"
        )
    sparse = method.graph == "regular" or method.carried_neighbours is not None
    if method.kind.carries and sparse and config.exchange == "protocol" and config.protocol.mode == "repair":
        raise ValueError(
            f"protocol.mode: the protocol repairs noise that {method.name} carries over where everyone shares with "
            "everyone; use graph = 'complete' without carried_neighbours, or mode = 'tolerate'"
        )
    least = config.training.separation
    if method.kind.whole_run and config.sampling_of(method) == "uniform" and least is None:
        raise ValueError(
            f"training.separation: {method.name} gains nothing from clients that may return at once; set it, or use "
            "sampling = 'cyclic'"
        )


def _check_quantile(config: Config, method: MethodConfig) -> None:
    """Whose clip can follow the norms of updates."""
    privacy = config.privacy
    if privacy.quantile is None:
        if privacy.first_clip is not None:
            raise ValueError(
                "privacy.first_clip: the clip stays as it is without a quantile; set clip instead"
            )
        return
    if privacy.unit != "client":
        raise ValueError(
            f"privacy.quantile: it is one of the norms of whole updates, and with unit {privacy.unit!r} other things "
            "are clipped; use unit = 'client'"
        )
    if method.kind.correlates:
        raise ValueError(
            f"privacy.quantile: {method.name} takes noise of one round out in another, which fails if the clip, and "
            "the noise with it, has changed in between; leave it out, or use a method whose rounds are independent"
        )


def _check_threshold(config: Config, method: MethodConfig) -> None:
    """A sum that is opened must hold the noise of someone honest."""
    threshold, colluders = config.plan(method).threshold, config.privacy.colluders
    if method.kind.uses("threshold") and threshold is not None:
        if threshold > config.training.participants:
            raise ValueError(
                f"methods.threshold: {threshold} uploads of {config.training.participants} participants; lower it"
            )
        if threshold <= colluders:
            raise ValueError(
                f"methods.threshold: {colluders} colluders among {threshold} uploads leave nobody whose noise is "
                "unknown; assume fewer, or ask for more uploads"
            )


def _check_protocol(config: Config) -> None:
    """What the real protocol cannot do.

    It hides whole clients of equal weight behind one target for all, draws a balanced graph, and adds its residual
    noise instead of multiplying. A setting that asks for something else is never run as if it had not been made.
    """
    privacy, training, instead = config.privacy, config.training, "or exchange = 'simulated'"
    if privacy.unit != "client":
        raise ValueError(
            f"privacy.unit: the protocol hides whole clients, not {privacy.unit!r}; use unit = 'client', {instead}"
        )
    if training.weights != "equal":
        raise ValueError(
            f"training.weights: in the protocol all clients weigh the same; use weights = 'equal', {instead}"
        )
    sharing = [method for method in config.methods if method.kind.has_protocol]
    if sharing and isinstance(privacy.epsilon, tuple):
        raise ValueError(
            f"privacy.epsilon: the protocol has one target for all clients; give one number, {instead}"
        )
    for method in sharing:
        if method.graph not in ("regular", "complete"):
            raise ValueError(
                f"methods.graph: the protocol draws regular or complete graphs, not {method.graph!r}; "
                f"use graph = 'regular', {instead}"
            )
        few = method.neighbours < training.participants - 1
        if method.graph == "complete" and few and not method.kind.carries:
            raise ValueError(
                f"methods.neighbours: {method.neighbours:g} shares from each of {training.participants} clients do "
                f"not make a complete graph in the protocol; use neighbours = {training.participants - 1}, "
                f"graph = 'regular', {instead}"
            )
        if isinstance(method.tau2, tuple):
            raise ValueError(
                "methods.tau2: the protocol has one tau2 for all clients; give one number, 'calibrated', "
                f"{instead}"
            )
        if method.distorts is not None and method.distorts.multiplies:
            raise ValueError(
                f"methods.distortion: the protocol adds its residual noise, {method.distortion!r} would multiply; "
                f"use distortion = 'additive', {instead}"
            )
