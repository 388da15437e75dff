"""The names of the columns of a sample batch: the caller's, the model's own, or the argument's."""


class Names:
    """The names of a batch's columns: of the caller, of the model, or of the argument."""

    def __init__(self, leaves, given, model):
        self.leaves, self.names = leaves, {}
        found = columns_of_model(model)
        for place, leaf in enumerate(leaves):
            names = given.get(leaf.name)
            if isinstance(names, (list, tuple)):
                if len(names) != leaf.width:
                    raise ValueError(
                        f"columns[{leaf.name!r}] has {len(names)} names, and `{leaf.name}` has "
                        f"{leaf.width} columns"
                    )
                self.names[place] = {column: (name, 1) for column, name in enumerate(names)}
            elif leaf.width > 1 and leaf.width in found:
                self.names[place] = found[leaf.width]

    def of(self, leaf, column):
        """Returns the name of one column; None if it has none of its own."""
        return self.names.get(leaf, {}).get(column, (None, 0))[0]

    def separate(self, leaf, column):
        """Returns what columns of one feature have in common; False if each stands alone."""
        if leaf not in self.names:
            return None
        name, width = self.names[leaf].get(column, (None, 1))
        return name if width > 1 else False

    def feature(self, leaf, columns):
        """Returns the name of the feature that has these columns."""
        own, whole = self.of(leaf, columns[0]), self.leaves[leaf]
        if own is not None:
            return own
        if len(columns) == whole.width:
            return whole.name
        return f"{whole.name}{columns[0]}" + (f"_{columns[-1]}" if len(columns) > 1 else "")

    def dense(self, leaf, column):
        name, width = self.names.get(leaf, {}).get(column, (None, 1))
        if name is not None and width == 1:
            return name
        own = self.leaves[leaf]
        return own.name if own.width == 1 else f"{name or own.name}{column}"


def columns_of_model(model):
    """Maps the width of a matrix to the names of its columns, as packages keep them: a dict of the
    model from names to a column, or to a first and an end column."""
    found = {}
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, dict) or not value:
                continue
            if not all(isinstance(name, str) for name in value):
                continue
            spans = []
            for name, place in value.items():
                if isinstance(place, int) and not isinstance(place, bool):
                    spans.append((place, place + 1, name))
                elif (isinstance(place, (tuple, list)) and len(place) == 2
                      and all(type(end) is int for end in place)):
                    spans.append((*place, name))
            spans.sort()
            ends = [0] + [end for _, end, _ in spans]
            if len(spans) == len(value) and all(a == e for (a, _, _), e in zip(spans, ends)):
                names = {
                    column: (name, end - begin)
                    for begin, end, name in spans for column in range(begin, end)
                }
                found.setdefault(ends[-1], names)
    return found
