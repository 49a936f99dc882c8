"""The reference page of environment variables: what each one does, and where it is read."""

from __future__ import annotations

# A test compares these names with what the source reads.
READ_BY_NISS = {
    "NISS_DATA": "Folder that is searched first for datasets, as `$NISS_DATA/mnist/…`. Downloads go to the user cache.",
    "NISS_TRACKER_STORE": "Store of `niss tracker`, as `--store`; for an address that holds a password.",
    "XDG_CACHE_HOME": "Where downloads are kept, in its folder `niss`; else `~/.cache/niss`. Must be absolute.",
    "XDG_STATE_HOME": "Where the log of a crash is kept, in its folder `niss`; else `~/.local/state/niss`. Must be "
    "absolute.",
    "XDG_CONFIG_HOME": "Where `niss keys` keeps an identity, in its folder `niss`; else `~/.config/niss`. Must be "
    "absolute.",
    "COLUMNS": "How wide results are printed, in a pipe too; else as wide as the terminal, and 140 columns in a pipe.",
    "OMP_NUM_THREADS": "The most threads that expand shares (`niss[fast]`), and threads of linear algebra. `make` sets "
    "it to 1: many small steps are fastest so, and the simulator sets its own by `training.threads`.",
}
SET_BY_LAUNCHERS = {
    "RANK": "The number of this process among those that train a run together, from 0. Not set: it trains alone.",
    "WORLD_SIZE": "How many processes these are.",
    "LOCAL_RANK": "Its number among those on its machine, which is also the number of its GPU; else its rank.",
    "LOCAL_WORLD_SIZE": "How many processes are on its machine; else all.",
    "MASTER_ADDR": "Where rank 0 is reached.",
    "MASTER_PORT": "And on which port.",
    "TORCHELASTIC_USE_AGENT_STORE": "Whether the launcher itself holds what the processes tell each other.",
    "TORCHELASTIC_RESTART_COUNT": "How often the launcher has started all of them again.",
}
READ_BY_OTHERS = {
    "NO_COLOR": "Set to anything: no colours in the terminal (rich).",
    "CUDA_VISIBLE_DEVICES": "Which GPUs torch sees; empty: none, and `--device auto` takes the CPU.",
    "FLWR_HOME": "Flower's own settings, which name the SuperLink.",
}


def environment_page() -> str:
    return (
        "\n\n".join(
            [
                "# Environment variables",
                "## Read by niss",
                _table(READ_BY_NISS),
                "## Set by torchrun, and read by `niss run` and `niss compare`",
                _table(SET_BY_LAUNCHERS),
                "## Read by what niss is built on",
                _table(READ_BY_OTHERS),
                "`make PYTHON=python3.12 demo` chooses the Python that `.venv` is made with.",
            ]
        )
        + "\n"
    )


def _table(rows: dict[str, str]) -> str:
    return "\n".join(
        [
            "| Variable | What it does |",
            "| --- | --- |",
            *(f"| `{name}` | {text} |" for name, text in rows.items()),
        ]
    )
