"""Tests the daemon with NVIDIA's own clients: tritonclient over gRPC and over HTTP, unchanged.

The daemon serves the coupon model on a Unix socket and on the loopback device. Every function of
the clients that the daemon has is called, and every score is compared with the trainer's. Prints
SKIPPED if tritonclient is missing and cannot be installed.

Usage: python3 tests/triton_clients.py FOLDER, the folder of the programs hatchback and hatchbackd.
The virtual environment is target/tritonclient.
"""

import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from daemon_car import MODEL, REPOSITORY, Car, heldout
from virtual_env import run_inside

PACKAGES = ["tritonclient[grpc,http]==2.73.0"]


def arrays(samples: list[dict], metadata: dict) -> dict:
    """Returns the inputs of the model for `samples`, as its metadata says: keys padded with -1."""
    import numpy

    found = {}
    for tensor in metadata["inputs"]:
        name, width = tensor["name"], int(tensor["shape"][1])
        if tensor["datatype"] == "FP32":
            found[name] = numpy.array([s["dense"] for s in samples], dtype=numpy.float32)
            continue
        bags = [s["sparse"].get(name, []) for s in samples]
        rows = [bag + [-1] * (width - len(bag)) for bag in bags]
        found[name] = numpy.array(rows, dtype=numpy.int64)
    return found


def jagged(arrays_by_name: dict, samples: list[dict]) -> dict:
    """Returns the same inputs with jagged keys and offsets in place of padded keys."""
    import numpy

    found = {}
    for name, array in arrays_by_name.items():
        if array.dtype == numpy.float32:
            found[name] = array
            continue
        bags = [s["sparse"].get(name, []) for s in samples]
        found[f"{name}.keys"] = numpy.array([key for bag in bags for key in bag], dtype=numpy.int64)
        ends = numpy.cumsum([0] + [len(bag) for bag in bags])
        found[f"{name}.offsets"] = ends.astype(numpy.int64)
    return found


def check_scores(scores, statuses, samples: list[dict]) -> None:
    import numpy

    expected = numpy.array([s["score"] for s in samples], dtype=numpy.float32)
    difference = float(numpy.abs(scores.reshape(-1) - expected).max())
    # The tables of the model have 8 bits a value.
    assert difference < 0.01, f"a score differs by {difference}"
    assert statuses.shape == (len(samples), 5) and statuses.dtype == numpy.int32
    lookups = sum(len(bag) for s in samples for bag in s["sparse"].values())
    assert statuses[:, 0].sum() == lookups and not statuses[:, 1:].any(), statuses.sum(axis=0)


def suite(client, module, kind: str, samples: list[dict], token: str) -> None:
    """Calls every function that both clients have. `kind` is `grpc` or `http`."""
    import numpy

    owner = {"authorization": f"Bearer {token}"}
    as_json = {"as_json": True} if kind == "grpc" else {}
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert not client.is_model_ready("absent") and not client.is_model_ready(MODEL, "7")
    server = client.get_server_metadata(**as_json)
    assert server["name"] == "hatchback" and "binary_tensor_data" in server["extensions"]
    metadata = client.get_model_metadata(MODEL, **as_json)
    assert [t["name"] for t in metadata["outputs"]] == [
        "score", "status", "generation", "position"
    ]
    config = client.get_model_config(MODEL, **as_json)
    config = config.get("config", config)
    assert config["max_batch_size"] == 256 and config["backend"] == "hatchback"
    assert len(config["input"]) == len(metadata["inputs"])

    def infer(inputs: dict, outputs: list | None = None, model: str = MODEL, **options):
        tensors = []
        for name, array in inputs.items():
            types = {"float32": "FP32", "int64": "INT64"}
            tensors.append(module.InferInput(name, array.shape, types[str(array.dtype)]))
            tensors[-1].set_data_from_numpy(array)
        wanted = outputs and [module.InferRequestedOutput(name) for name in outputs]
        return client.infer(model, tensors, outputs=wanted, **options)

    def refused(expected: str, call, *arguments, **options) -> None:
        from tritonclient.utils import InferenceServerException

        try:
            call(*arguments, **options)
        except InferenceServerException as error:
            assert expected in str(error), f"{error!r} has no {expected!r}"
            return
        raise AssertionError(f"not refused: {expected}")

    whole = arrays(samples, metadata)
    answer = infer(whole, request_id="r7")
    check_scores(answer.as_numpy("score"), answer.as_numpy("status"), samples)
    assert answer.as_numpy("generation").tolist() == [1]
    response = answer.get_response(**as_json)
    assert response["id"] == "r7" and response["model_version"] == "1", response
    answer = infer(jagged(whole, samples), outputs=["score", "status"])
    check_scores(answer.as_numpy("score"), answer.as_numpy("status"), samples)
    assert answer.as_numpy("generation") is None
    for number in range(20):
        one = arrays(samples[number : number + 1], metadata)
        answer = infer(one, model_version="1")
        check_scores(
            answer.as_numpy("score"), answer.as_numpy("status"), samples[number : number + 1]
        )

    best = infer(whole, parameters={"top_k": 3})
    order = numpy.argsort(-infer(whole).as_numpy("score")[:, 0], kind="stable")
    assert best.as_numpy("position").tolist() == order[:3].tolist()
    assert best.as_numpy("score").shape == (3, 1)
    refused("must be an integer of 1 or more", infer, whole, parameters={"top_k": 0})

    dense = next(name for name, array in whole.items() if array.dtype == numpy.float32)
    keys = next(name for name, array in whole.items() if array.dtype == numpy.int64)
    one = arrays(samples[:1], metadata)
    answer = infer({name: array for name, array in one.items() if name != keys})
    assert answer.as_numpy("status")[0, 0] == sum(map(len, samples[0]["sparse"].values())) - 1
    refused("is missing", infer, {name: a for name, a in one.items() if name != dense})
    refused("no such input", infer, {**one, "other": one[keys]})
    refused("no output `other`", infer, one, outputs=["other"])
    refused("samples", infer, {**one, keys: whole[keys]})
    # The table of an index has no negative key, as it has none beyond its rows.
    answer = infer({**one, keys: numpy.array([[-2]])})
    assert answer.as_numpy("status")[0, 2] == 1
    refused("takes FP32", infer, {**one, dense: one[dense].astype(numpy.int64)})
    refused("keys, at most", infer, {**one, keys: numpy.array([[1] * 5000])})
    refused("version", infer, one, model_version="9")
    refused("no model `absent`", infer, one, model="absent")
    # The cache holds a part of the rows: a sample that is new needs one from flash.
    new = [arrays([sample], metadata) for sample in heldout(len(samples))]
    refused("deadline exceeded", lambda: [infer(one, timeout=1) for one in new])
    assert infer(one, timeout=10_000_000).as_numpy("score").size == 1

    statistics = client.get_inference_statistics(MODEL, **as_json)["model_stats"][0]
    assert int(statistics["inference_count"]) >= 2 * len(samples) + 20, statistics
    assert int(statistics["inference_stats"]["success"]["count"]) >= 22
    assert int(statistics["inference_stats"]["fail"]["count"]) >= 5

    models = client.get_model_repository_index(headers=owner, **as_json)
    models = models["models"] if kind == "grpc" else models
    assert (
        sorted((m["name"], m["state"]) for m in models) == [(MODEL, "READY"), ("second", "READY")]
    )
    refused("may not do this", client.unload_model, "second")
    client.unload_model("second", headers=owner)
    assert not client.is_model_ready("second") and client.is_model_ready(MODEL)
    refused("no model `second`", client.unload_model, "second", headers=owner)
    client.load_model("second", headers=owner)
    assert client.is_model_ready("second")
    refused("no folder holds", client.load_model, "third", headers=owner)
    refused("own files only", client.load_model, "second", headers=owner, config="{}")
    print(f"tritonclient over {kind}: all passed")


def refuses_beyond_the_budget(programs: pathlib.Path) -> None:
    """A model that does not fit beside the first is refused with the line of the budget."""
    import tritonclient.http as http

    # The front door takes 48 MiB. A model takes more than half of the rest.
    memory = (48 << 20) + 16_000_000
    with (
        tempfile.TemporaryDirectory() as folder, Car(programs, pathlib.Path(folder), memory) as car
    ):
        client = http.InferenceServerClient(f"127.0.0.1:{car.port}")
        owner = {"authorization": f"Bearer {car.token()}"}
        served = [m["name"] for m in client.get_model_repository_index() if m["state"] == "READY"]
        other = ({MODEL, "second"} - set(served)).pop()
        try:
            client.load_model(other, headers=owner)
            raise AssertionError("both models fit; make the budget of this test smaller")
        except Exception as error:
            assert "memory_bytes_max" in str(error) and "are taken" in str(error), error
        car.stop()
    print("a model beyond the budget is refused with the budget's line")


def serving_page(car) -> None:
    """Runs the code of docs/serving.md as the page shows it, on the socket of `car`."""
    import json
    import shutil

    text = (REPOSITORY / "docs" / "serving.md").read_text()
    block = lambda kind: text.split(f"```{kind}\n")[1].split("```")[0]  # noqa: E731
    here = lambda code: code.replace("/run/hatchback/socket", str(car.socket))  # noqa: E731
    names: dict = {}
    exec(here(block("python")), names)
    assert names["client"].is_server_ready()
    if shutil.which("curl") is None:
        print("SKIPPED: the request of docs/serving.md: curl is not installed")
        return
    run = ["sh", "-euc", here(block("sh"))]
    answer = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    assert 0 < found["score"][0] < 1 and found["status"] == [1, 0, 0, 0, 0], answer
    print("the code of docs/serving.md: passed")


def page(car) -> None:
    """Runs the code of docs/migrating.md as it stands there, on the port of `car`."""
    text = (REPOSITORY / "docs" / "migrating.md").read_text()
    code = text.split("<!-- triton -->\n```python\n")[1].split("```")[0]
    assert code.count("127.0.0.1:8000") == 1 and f'"{MODEL}"' in code
    names: dict = {}
    exec(code.replace("127.0.0.1:8000", f"127.0.0.1:{car.port}"), names)
    assert names["scores"].shape == (1, 1) and names["generation"] == 1
    assert (
        names["statuses"].sum()
        == sum(t["datatype"] == "INT64" for t in names["metadata"]["inputs"])
    )
    print("the code of docs/migrating.md: passed")


def main() -> None:
    import tritonclient.grpc as grpc
    import tritonclient.http as http

    programs, samples = pathlib.Path(sys.argv[1]).resolve(), heldout()
    with tempfile.TemporaryDirectory() as folder, Car(programs, pathlib.Path(folder)) as car:
        token = car.token()
        suite(grpc.InferenceServerClient(f"127.0.0.1:{car.port}"), grpc, "grpc", samples, token)
        suite(http.InferenceServerClient(f"127.0.0.1:{car.port}"), http, "http", samples, token)
        page(car)
        serving_page(car)

        # gRPC names a Unix socket by its path, with escapes that an HTTP authority cannot have.
        authority = [("grpc.default_authority", "localhost")]
        client = grpc.InferenceServerClient(f"unix:{car.socket}", channel_args=authority)
        assert client.is_server_ready()
        # On a Unix socket the daemon's own user needs no token.
        client.unload_model("second")
        client.load_model("second")
        print("tritonclient over gRPC on a Unix socket: all passed")

        for accepted, is_open in (("*/*", False), ("application/openmetrics-text", True)):
            url, headers = f"http://127.0.0.1:{car.port}/metrics", {"accept": accepted}
            request = urllib.request.Request(url, headers=headers)
            text = urllib.request.urlopen(request).read().decode()
            line = 'hatchback_requests_total{model="coupon",protocol="grpc",outcome="answered"}'
            assert line in text and "hatchback_request_seconds_bucket" in text
            assert text.endswith("# EOF\n") == is_open
        car.stop()
    refuses_beyond_the_budget(programs)


if __name__ == "__main__":
    if "--inside" in sys.argv:
        main()
    else:
        run_inside("tritonclient", PACKAGES, "tritonclient.grpc, tritonclient.http")
