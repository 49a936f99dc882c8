# moved
from niss.protocol.shares import PairSecrets as Ties  # noqa: F401
from niss.protocol.shares import masked_upload, open_piece, round_update, self_mask_pieces  # noqa: F401
