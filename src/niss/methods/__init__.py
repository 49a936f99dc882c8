"""The methods that can be run and compared, one object each, and the distortions of shares likewise.

>>> METHODS["central-dp"].trusts_server
True
>>> [name for name, method in METHODS.items() if method.shares_noise]
['niss', 'niss-carried']

A new method is a file with a subclass of `Method`, and a line below.
"""

from __future__ import annotations

from niss.mechanism import DISTORTIONS, Distortion, distortion_named
from niss.methods.base import (
    RELATIONS,
    CarriedEdges,
    Method,
    NoiseHistory,
    PlainRows,
    UploadRows,
    client_sensitivity,
    marginal_mu,
    mu_of,
    of_participants,
    server_adversary,
)
from niss.methods.central import Alone, CentralDp, CentralDpSampled, CentralMf
from niss.methods.fedavg import DpFedAvg, FedAvg, SecAggDdg, discrete_mu, enough_uploads
from niss.methods.look import Look
from niss.methods.niss import Niss, NissCarried
from niss.methods.sharing import enough_neighbours, too_sparse

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        FedAvg(),
        Alone(),
        DpFedAvg(),
        CentralDp(),
        CentralDpSampled(),
        CentralMf(),
        SecAggDdg(),
        Niss(),
        NissCarried(),
    )
}  # fmt: skip


def look_of(method: str, *, protected: bool = True) -> Look:
    """How the method of that registered name is drawn; one that this version does not know has a look too.

    protected  False: it guarantees nothing in this run, whatever noise it adds
    """
    known = METHODS.get(method)
    look = Method.look if known is None else known.look
    return look if protected and (known is None or known.private) else look.unprotected()
