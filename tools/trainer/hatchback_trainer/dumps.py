"""Windows from trainers that dump their own changes: SOK (TensorFlow) and dynamicemb (TorchRec).

Each tap asks its trainer for the rows that changed since the last window, and for a little more.
Rows are whole, so a row that is sent twice does no harm. Call `settle` once `WindowWriter.write`
has written the changes: until then the next call returns them again. A new tap begins at its own
start. No dump tells of rows that a table evicted, so the fleet keeps them. The trainer's dump
function is an argument, so this file imports neither library.
"""

from datetime import datetime, timedelta, timezone

import numpy as np

from .window import Changes, as_u64


def last_of_each(keys, rows):
    """Returns each key with its last row. A key occurs more than once if several ranks dump it."""
    keys, rows = as_u64(keys), np.asarray(rows, dtype=np.float32)
    _, last = np.unique(keys[::-1], return_index=True)
    kept = np.sort(len(keys) - 1 - last)
    return keys[kept], rows[kept]


class SokTap:
    """The changes of SOK variables:
    `SokTap(sok.incremental_model_dump, {"user": user_var, "item": item_var})`.

    SOK compares its GPU's clock with the host's, so the tap asks for `margin_s` seconds
    more than the window.
    """

    def __init__(self, dump, variables, margin_s=5.0):
        self.dump, self.variables, self.margin = dump, dict(variables), timedelta(seconds=margin_s)
        self.since = self.asked = datetime.now(timezone.utc)

    def changes(self):
        """Returns the `Changes` of each table since the last `settle`, for `WindowWriter.write`."""
        self.asked = datetime.now(timezone.utc)
        keys, rows = self.dump(list(self.variables.values()), self.since - self.margin)
        if len(keys) != len(self.variables) or len(rows) != len(self.variables):
            raise ValueError(
                f"sok.incremental_model_dump returned {len(keys)} tables "
                f"for {len(self.variables)} variables"
            )
        return {
            name: Changes(*last_of_each(*one)) for name, *one in zip(self.variables, keys, rows)
        }

    def settle(self):
        """Forgets the changes, because a window has them."""
        self.since = self.asked


class DynamicEmbTap:
    """The changes of dynamicemb tables: `DynamicEmbTap(incremental_dump, model)`.

    `tables` maps (collection, table) of the model to table names; by default a table keeps its
    name. The score of a row must grow with the steps (strategies TIMESTAMP and STEP). The dump
    includes the threshold itself, so the next window contains the last step of this one again.
    """

    def __init__(self, dump, model, tables=None):
        self.dump, self.model, self.tables = dump, model, tables
        _, self.scores = dump(model, (1 << 63) - 1)
        self.reached = self.scores

    def changes(self):
        """Returns the `Changes` of each table since the last `settle`, for `WindowWriter.write`."""
        dumped, scores = self.dump(self.model, self.scores)
        for collection, tables in scores.items():
            for table, score in tables.items():
                if score < self.scores[collection][table]:
                    raise ValueError(
                        f"table `{table}` of `{collection}`: score {score} is below that "
                        "of the last window"
                    )
        self.reached = scores
        changes = {}
        for collection, tables in dumped.items():
            for table, (keys, rows) in tables.items():
                name = table if self.tables is None else self.tables[collection, table]
                if name in changes:
                    raise ValueError(f"two tables are named `{name}`: pass `tables`")
                changes[name] = Changes(
                    *last_of_each(keys.cpu().numpy(), rows.float().cpu().numpy())
                )
        return changes

    def settle(self):
        """Forgets the changes, because a window has them."""
        self.scores = self.reached
