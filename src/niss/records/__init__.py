"""The clipped sum over a secret batch of records: what a silo that hides single records uploads.

    records = Records(model, (inputs, labels))
    batch = draw_batch(len(records), 0.05, SecretStream.fresh())
    total = clipped_sum(records, records.weights, batch, clip=0.1)

`draw_batch` flips a coin for each record, `clipped_sum` adds their gradients, each clipped (`clipped_sums` those of
several silos), `clipped_rows` hands them out one by one, and `reference_sum` is the definition that all are tested
against. A `Records` holds any torch module, or a regression by closed form, without torch.
"""

from niss.records.batches import draw_batch
from niss.records.closed_form import LinearRegression, LogisticRegression
from niss.records.problem import Records, clipped_rows, clipped_sum, clipped_sums, reference_sum

__all__ = [
    "LinearRegression",
    "LogisticRegression",
    "Records",
    "clipped_rows",
    "clipped_sum",
    "clipped_sums",
    "draw_batch",
    "reference_sum",
]
