# moved
from niss.attacks.experiment import (  # noqa: F401
    Experiment,
    Findings,
    Progress,
    Row,
    no_progress,
    prepare_folder,
    write_findings,
)
