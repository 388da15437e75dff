"""Turns the in-vehicle coupon data into samples: defines the features, keys and dense
values of each column.

Reads the CSV (12,684 rows: a driver gets the offer of a coupon; Y = 1: the
driver accepted). Never trains.
"""

import csv
import hashlib

from ..samples import Sample
from ..schema import Feature, Input, Schema, Table

DIM = 16

# Each column has one table and one feature. A key is the position of the value among the sorted
# values ("" is one).
COLUMNS = (
    "destination",
    "passanger",  # [sic]: the names are the data set's
    "weather",
    "time",
    "coupon",
    "gender",
    "age",
    "maritalStatus",
    "education",
    "occupation",
    "income",
    "car",
)

# Hashed crosses: the values of several columns as one key, `rows` possible keys.
CROSSES = {
    "coupon_x_occupation": (256, ("coupon", "occupation")),
    "coupon_x_passanger_x_time": (256, ("coupon", "passanger", "time")),
    "coupon_x_income_x_age": (1024, ("coupon", "income", "age")),
    "driver": (
        2048,
        (
            "gender", "age", "maritalStatus", "has_children", "education", "occupation", "income",
            "car"
        )
    ),
}

# How often the driver visits each kind of place. All these columns have the same five
# answers, or are empty.
PLACES = ("Bar", "CoffeeHouse", "CarryAway", "RestaurantLessThan20", "Restaurant20To50")
FREQUENCIES = ("", "never", "less1", "1~3", "4~8", "gt8")
OFTEN = ("1~3", "4~8", "gt8")  # at least once a month

DENSE = (
    "temperature", "age_years", "expiration_hours", "has_children", "to_coupon_15min",
    "to_coupon_25min", "same_direction"
)
AGES = {"below21": 18, "50plus": 55}
HOURS = {"2h": 2, "1d": 24}


def read_rows(path):
    with open(path, encoding="ascii", newline="") as file:
        return list(csv.DictReader(file))


def vocabulary(rows):
    """Maps each column to its values. The position of a value in the list is its key."""
    return {column: sorted({row[column] for row in rows}) for column in COLUMNS}


def hashed(values, rows):
    """Returns a key below `rows`: the first 8 bytes of SHA-256 over the values joined by
    newlines, little-endian, modulo `rows`."""
    digest = hashlib.sha256("\n".join(values).encode()).digest()
    return int.from_bytes(digest[:8], "little") % rows


def visits(row):
    """Returns the kinds of place that the driver visits at least once a month: 0 to 5 keys."""
    return [key for key, place in enumerate(PLACES) if row[place] in OFTEN]


def coupon_visits(row, coupon):
    """Returns 5 keys, one for each place: (coupon, place, frequency)."""
    levels = [FREQUENCIES.index(row[place]) for place in PLACES]
    return [
        (coupon * len(PLACES) + place) * len(FREQUENCIES) + level
        for place, level in enumerate(levels)
    ]


def dense_values(row):
    """Returns raw values: degrees Fahrenheit, years, hours, flags. The
    network contains their scaling."""
    age = AGES[row["age"]] if row["age"] in AGES else int(row["age"])
    flags = ("has_children", "toCoupon_GEQ15min", "toCoupon_GEQ25min", "direction_same")
    return [
        float(value)
        for value in (
            row["temperature"], age, HOURS[row["expiration"]], *(row[flag] for flag in flags)
        )
    ]


def to_sample(row, words):
    sparse = {column: [words[column].index(row[column])] for column in COLUMNS}
    sparse["visits"] = visits(row)
    sparse["coupon_x_visits"] = coupon_visits(row, sparse["coupon"][0])
    for name, (size, columns) in CROSSES.items():
        sparse[name] = [hashed([row[column] for column in columns], size)]
    sparse = {name: bag for name, bag in sparse.items() if bag}
    return Sample(dense_values(row), sparse, label=int(row["Y"]))


def is_held_out(number):
    """Selects one row in five by a hash of the row's number (from 0)."""
    return hashed([str(number)], 5) == 0


def split(rows, words):
    """Returns the training samples and the held-out samples."""
    train, held_out = [], []
    for number, row in enumerate(rows):
        (held_out if is_held_out(number) else train).append(to_sample(row, words))
    return train, held_out


def schema(words):
    sizes = {column: len(words[column]) for column in COLUMNS}
    sizes["visits"] = len(PLACES)
    sizes["coupon_x_visits"] = len(words["coupon"]) * len(PLACES) * len(FREQUENCIES)
    sizes |= {name: size for name, (size, _) in CROSSES.items()}
    pooled = {"visits": ("sum", 5), "coupon_x_visits": ("mean", 5)}
    tables = tuple(Table(name, rows, DIM, counted=True) for name, rows in sizes.items())
    features = tuple(Feature(name, name, *pooled.get(name, ("sum", 1))) for name in sizes)
    inputs = (Input("dense"), Input("emb", tuple(sizes), stacked=True))
    return Schema("coupon-dlrm", DENSE, inputs, tables, features)
