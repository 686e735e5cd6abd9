"""Speaks through a gateway with the official client: openai_speech.py URL DIRECTORY.

Audio goes into files of the directory, everything else as JSON to standard output. What the client should do by
itself is asserted here; what the bytes are is the caller's to check.
"""

import base64
import json
import pathlib
import sys
import time

import openai

TEXT = "The ferry leaves the harbor at six."


def main(url, directory):
    directory = pathlib.Path(directory)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    speech = client.audio.speech
    asked = {"model": model.id, "voice": "nano", "input": TEXT, "extra_body": {"seed": 7}}

    for response_format in ["wav", "pcm", "flac", "opus", "mp3"]:
        response = speech.create(**asked, response_format=response_format)
        response.write_to_file(directory / f"whole.{response_format}")
        assert response.response.headers["x-request-id"]
    default = speech.create(**asked).content
    assert default == (directory / "whole.mp3").read_bytes(), "mp3 is the API's default"
    speech.create(**asked, response_format="pcm", speed=2.0).write_to_file(directory / "fast.pcm")

    began = time.monotonic()
    arrivals = []
    with speech.with_streaming_response.create(**asked, response_format="pcm") as response:
        with open(directory / "streamed.pcm", "wb") as file:
            for chunk in response.iter_bytes():
                arrivals.append(time.monotonic() - began)
                file.write(chunk)

    events = []
    with speech.with_streaming_response.create(**asked, response_format="pcm", stream_format="sse") as response:
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
    deltas = [event for event in events if event["type"] == "speech.audio.delta"]
    audio = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    (directory / "events.pcm").write_bytes(audio)

    # Who leaves in the middle of it: the place must be free behind this.
    with speech.with_streaming_response.create(**asked, response_format="pcm") as response:
        next(response.iter_bytes(1024))

    refused = {}
    for name, change, error in [
        ("voice", {"voice": "alloy"}, openai.NotFoundError),
        ("model", {"model": "tts-1"}, openai.NotFoundError),
        ("input", {"input": "…"}, openai.BadRequestError),
        ("response_format", {"response_format": "aac"}, openai.BadRequestError),
        ("instructions", {"instructions": "Whisper."}, openai.BadRequestError),
        ("speed", {"speed": 9}, openai.BadRequestError),
    ]:
        try:
            speech.create(**(asked | change))
        except error as caught:
            assert caught.param == name, caught
            assert caught.request_id, caught
            refused[name] = [caught.code, caught.type, caught.message]
        else:
            raise AssertionError(f"{change} was accepted")

    json.dump({"arrivals": arrivals, "done": events[-1], "refused": refused, "n_deltas": len(deltas)}, sys.stdout)


main(*sys.argv[1:])
