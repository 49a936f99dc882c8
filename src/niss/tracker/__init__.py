"""The tracker: who is live, who sits in a round, and the beacon that fixes who shares noise with whom.

It learns who takes part and when. It never sees an update, a share, a seed or a private key: noise is agreed on
between clients, from the signed public keys it hands out. `client` needs nothing beyond what niss itself does;
the service itself (`app`, `serve`) comes with `niss[tracker]`.
"""
