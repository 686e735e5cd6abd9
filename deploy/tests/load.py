"""Callers that speak without end through a gateway, with NVIDIA's Riva client, and note how each stream ended."""

import dataclasses
import hashlib
import threading
import time

import grpc
import riva.client

TEXTS = [
    "The ferry leaves the harbor at six, and the last train waits for nobody on the other side.",
    "Every morning the baker opens the window and the smell of bread goes up the narrow street.",
    "It rained all night, so the river was high and the children stayed at home with their books.",
]
CALLERS = 4
# A stream that takes longer hangs.
STREAM_S = 90


@dataclasses.dataclass
class Outcome:
    number: int
    code: str
    began: float
    ended: float
    right: bool
    why: str = ""


class Load:
    """Entered, it speaks; left, it waits for what runs. `outcomes` then has every stream."""

    expected = {}

    def __init__(self, gateway):
        self.gateway = gateway
        self.outcomes = []
        self.stuck = 0
        self._lock = threading.Lock()
        self._open = {}
        self._next = 0
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._threads = [threading.Thread(target=self._speak, daemon=True) for _ in range(CALLERS)]

    def __enter__(self):
        for index in range(len(TEXTS)):
            if index not in Load.expected:
                Load.expected[index] = self._once(self._service(), index)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        ends = time.monotonic() + STREAM_S
        for thread in self._threads:
            thread.join(max(0, ends - time.monotonic()))
        self.stuck = sum(thread.is_alive() for thread in self._threads)

    def _service(self):
        return riva.client.SpeechSynthesisService(riva.client.Auth(uri=self.gateway))

    def _once(self, service, index, heard=lambda: None):
        digest = hashlib.sha256()
        stream = service.synthesize_online(TEXTS[index], sample_rate_hz=24000, custom_configuration={"seed": str(index + 1)})
        for response in stream:
            digest.update(response.audio)
            heard()
        return digest.hexdigest()

    def _speak(self):
        service = self._service()
        while not self._stop.is_set():
            if self._paused.is_set():
                time.sleep(0.1)
                continue
            began = time.monotonic()
            with self._lock:
                number = self._next
                self._next += 1
            index = number % len(TEXTS)

            def heard(number=number):
                self._open.setdefault(number, True)

            code, why, right = "OK", "", False
            try:
                right = self._once(service, index, heard) == Load.expected[index]
            except grpc.RpcError as error:
                code, why = error.code().name, error.details()
            with self._lock:
                self._open.pop(number, None)
                self.outcomes.append(Outcome(number, code, began, time.monotonic(), right, why))
            if code != "OK":
                # As a caller would: not at once again.
                time.sleep(0.5)

    def open_streams(self):
        """Numbers of the streams that have audio and no end."""
        with self._lock:
            return set(self._open)

    def until_busy(self):
        ends = time.monotonic() + STREAM_S
        while len(self.open_streams()) < 2:
            if time.monotonic() > ends:
                raise AssertionError("no two streams at once")
            time.sleep(0.05)

    def finished_since(self, moment):
        with self._lock:
            return sum(outcome.code == "OK" and outcome.ended > moment for outcome in self.outcomes)

    def pause(self):
        """Begin no more streams."""
        self._paused.set()
