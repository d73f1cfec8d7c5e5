"""TEI's API: `/embed`, `/similarity`, `/predict`, `/info`, and the bodies of `/rerank` that have `texts`."""

from __future__ import annotations

from tureen.dialects.tei import routes as tei
from tureen.dialects.tei.routes import TABLES, TeiEmbedBody, TeiPredictBody, TeiRerankBody, TeiSimilarityBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

PAGE = "See [embeddings](embeddings.md#text-embeddings-inference)."

DIALECT = Dialect(
    order=90,
    routes=tei.routes,
    compat=(
        CompatRoute("TEI", "/embed", (BodyPart(TeiEmbedBody, TABLES["embed"]),)),
        CompatRoute("TEI", "/similarity", (BodyPart(TeiSimilarityBody, TABLES["similarity"]),)),
        CompatRoute("TEI", "/rerank", (BodyPart(TeiRerankBody, TABLES["rerank"]),)),
        CompatRoute("TEI", "/predict", (BodyPart(TeiPredictBody, TABLES["predict"]),)),
    ),
    sections=(
        BodySection("`POST /embed`", PAGE, TeiEmbedBody),
        BodySection("`POST /similarity`", PAGE, TeiSimilarityBody),
        BodySection("`POST /rerank` with `texts`", PAGE, TeiRerankBody),
        BodySection("`POST /predict`", PAGE, TeiPredictBody),
    ),
)
