"""The descriptions of a second embedding (Gemma 3n and 4) and of several residual streams (Gemma 3n). No torch."""

from __future__ import annotations

import msgspec


class LayerInputs(msgspec.Struct, frozen=True):
    """A second embedding of each token, with a part for every layer (Gemma 3n and 4).

    A part is the sum of the layer's slice of the token's row and a projection of the token's first embedding. The part
    multiplies a gate made from the layer's result. A projection of the product is added to the result. Tokens given as
    embeddings use the first row.
    """

    vocab_size: int
    size: int  # the size of a layer's part


class ResidualStreams(msgspec.Struct, frozen=True):
    """Several residual streams, of which layers compute only the first (AltUp, arXiv:2301.13310; Gemma 3n).

    A layer predicts every stream from all streams, computes with the first, and corrects every stream by the difference
    between the result and the prediction.
    """

    count: int
    rank: int  # of the low-rank product parallel to attention (LAuReL, arXiv:2411.07501)

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight of a layer, by the end of its name."""
        return {
            "altup.router_norm.weight": (hidden_size,),
            "altup.modality_router.weight": (self.count, hidden_size),
            "altup.prediction_coefs.weight": (self.count**2, self.count),
            "altup.correction_coefs.weight": (self.count, self.count),
            "altup.correct_output_scale": (hidden_size,),
            "laurel.linear_left.weight": (self.rank, hidden_size),
            "laurel.linear_right.weight": (hidden_size, self.rank),
            "laurel.post_laurel_norm.weight": (hidden_size,),
        }
