use super::*;
use crate::s16_from_f32;
use crate::testing::{cut, rms, sine};
use std::io::Cursor;

const ALL: [Encoding; 6] = [
    Encoding::PcmS16le,
    Encoding::PcmF32le,
    Encoding::Wav,
    Encoding::Flac,
    Encoding::OggOpus,
    Encoding::Mp3,
];

const RATES: [u32; 4] = [8_000, 16_000, 24_000, 48_000];

fn spec(encoding: Encoding, sample_rate: u32, speed: f32) -> AudioSpec {
    AudioSpec {
        encoding,
        sample_rate,
        speed,
    }
}

/// The bytes of each chunk, and of the end.
fn encoded(spec: AudioSpec, chunks: &[&[f32]]) -> (Vec<Vec<u8>>, u64) {
    let mut encoder = AudioEncoder::new(spec, 24_000).unwrap();
    let mut of_bytes = AudioEncoder::new(spec, 24_000).unwrap();
    let mut parts = Vec::new();
    for chunk in chunks {
        let (mut bytes, mut same) = (Vec::new(), Vec::new());
        encoder.push(chunk, &mut bytes).unwrap();
        let little_endian: Vec<_> = chunk.iter().map(|sample| sample.to_le_bytes()).collect();
        of_bytes.push_le(&little_endian, &mut same).unwrap();
        assert_eq!((&same, of_bytes.n_samples()), (&bytes, encoder.n_samples()));
        parts.push(bytes);
    }
    let mut bytes = Vec::new();
    encoder.finish(&mut bytes).unwrap();
    parts.push(bytes);
    (parts, encoder.n_samples())
}

fn decoded(encoding: Encoding, sample_rate: u32, bytes: &[u8]) -> Vec<f32> {
    let from_s16 = |bytes: &[u8]| -> Vec<f32> {
        bytes
            .chunks_exact(2)
            .map(|pair| f32::from(i16::from_le_bytes([pair[0], pair[1]])) / 32767.0)
            .collect()
    };
    match encoding {
        Encoding::PcmS16le => from_s16(bytes),
        Encoding::PcmF32le => bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
            .collect(),
        Encoding::Wav => {
            assert_eq!(bytes[4..8], [0xff; 4]);
            assert_eq!(bytes[24..28], sample_rate.to_le_bytes());
            from_s16(&bytes[crate::WAV_HEADER_BYTES..])
        }
        Encoding::Flac => {
            let mut reader = claxon::FlacReader::new(Cursor::new(bytes)).unwrap();
            assert_eq!(reader.streaminfo().sample_rate, sample_rate);
            reader
                .samples()
                .map(|sample| sample.unwrap() as f32 / 32767.0)
                .collect()
        }
        Encoding::OggOpus => decode_opus(sample_rate, bytes),
        Encoding::Mp3 => decode_mp3(sample_rate, bytes),
    }
}

/// By another implementation of the codec than the one that encodes.
fn decode_opus(sample_rate: u32, bytes: &[u8]) -> Vec<f32> {
    let mut reader = opus_pure::OggOpusReader::new(Cursor::new(bytes)).unwrap();
    let skip = usize::from(reader.head().pre_skip) * sample_rate as usize / 48_000;
    let mut decoder = opus_rs::OpusDecoder::new(sample_rate as i32, 1).unwrap();
    let n_samples = (sample_rate / 50) as usize;
    let mut out = Vec::new();
    let mut ends = 0;
    while let Some(packet) = reader.read_packet().unwrap() {
        let mut samples = vec![0.0; n_samples];
        let n_decoded = decoder.decode(&packet.data, n_samples, &mut samples).unwrap();
        assert_eq!(n_decoded, n_samples);
        out.extend(samples);
        ends = packet.page_granule.max(0) as usize * sample_rate as usize / 48_000;
    }
    out.truncate(ends);
    out.split_off(skip.min(out.len()))
}

fn decode_mp3(sample_rate: u32, bytes: &[u8]) -> Vec<f32> {
    use symphonia::core::audio::{AudioBufferRef, Signal as _};
    use symphonia::core::io::MediaSourceStream;
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes.to_vec())), Default::default());
    let probed = symphonia::default::get_probe()
        .format(
            &Default::default(),
            source,
            &Default::default(),
            &Default::default(),
        )
        .unwrap();
    let mut format = probed.format;
    let track = format.default_track().unwrap();
    assert_eq!(track.codec_params.sample_rate, Some(sample_rate));
    let mut decoder = symphonia::default::get_codecs()
        .make(&track.codec_params, &Default::default())
        .unwrap();
    let mut out = Vec::new();
    while let Ok(packet) = format.next_packet() {
        match decoder.decode(&packet).unwrap() {
            AudioBufferRef::F32(buffer) => out.extend_from_slice(buffer.chan(0)),
            _ => panic!("not what it decodes to"),
        }
    }
    out
}

/// How much of `b` is `a`, at the shift that fits best: 1 for the same signal. Codecs delay.
fn likeness(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len()) * 3 / 4;
    let max_shift = a.len().max(b.len()) - n;
    (0..=max_shift.min(4_000))
        .filter_map(|shift| b.get(shift..shift + n))
        .map(|b| {
            let product: f32 = a[..n].iter().zip(b).map(|(a, b)| a * b).sum();
            product / (rms(&a[..n]) * rms(b) * n as f32)
        })
        .fold(f32::NEG_INFINITY, f32::max)
}

/// Two tones whose sum does not repeat for a while.
fn signal(sample_rate: u32, n_samples: usize) -> Vec<f32> {
    let low = sine(217.0, sample_rate, n_samples);
    let high = sine(1_031.0, sample_rate, n_samples);
    low.iter().zip(&high).map(|(a, b)| a * 0.8 + b * 0.4).collect()
}

#[test]
fn every_format_decodes_back_at_every_rate() {
    let samples = signal(24_000, 24_000);
    for encoding in ALL {
        for rate in RATES {
            let (parts, n_samples) = encoded(spec(encoding, rate, 1.0), &cut(&samples, &[1920]));
            assert_eq!(n_samples, u64::from(rate), "{encoding:?} {rate}");
            let out = decoded(encoding, rate, &parts.concat());
            let n_extra = out.len() as i64 - i64::from(rate);
            let allowed = match encoding {
                Encoding::Mp3 => 0..5_000,
                _ => 0..1,
            };
            assert!(
                allowed.contains(&n_extra),
                "{encoding:?} {rate}: {n_extra} samples more"
            );
            let like = likeness(&signal(rate, rate as usize), &out);
            assert!(like > 0.95, "{encoding:?} {rate}: {like}");
        }
    }
}

#[test]
fn how_a_stream_is_cut_changes_no_byte() {
    let samples = signal(24_000, 10_007);
    for encoding in ALL {
        for (rate, speed) in [(24_000, 1.0), (48_000, 1.0), (8_000, 1.3)] {
            let spec = spec(encoding, rate, speed);
            let (whole, n_samples) = encoded(spec, &[&samples]);
            for sizes in [&[1920][..], &[1, 639, 5_000]] {
                let (parts, n_also) = encoded(spec, &cut(&samples, sizes));
                assert_eq!(n_also, n_samples);
                assert!(
                    parts.concat() == whole.concat(),
                    "{encoding:?} {rate} {speed} {sizes:?}"
                );
            }
        }
    }
}

/// A listener hears a stream before it has ended.
#[test]
fn every_format_streams() {
    let samples = signal(24_000, 48_000);
    for encoding in ALL {
        for rate in RATES {
            let (parts, _) = encoded(spec(encoding, rate, 1.0), &cut(&samples, &[4_800]));
            let early: usize = parts[..5].iter().map(Vec::len).sum();
            let all: usize = parts.iter().map(Vec::len).sum();
            assert!(
                early * 3 > all,
                "{encoding:?} {rate}: {early} of {all} bytes at half time"
            );
        }
    }
}

#[test]
fn a_stream_without_a_sample_is_still_a_file() {
    for encoding in ALL {
        let (parts, n_samples) = encoded(spec(encoding, 24_000, 1.0), &[]);
        assert_eq!(n_samples, 0);
        let bytes = parts.concat();
        let is_raw = matches!(encoding, Encoding::PcmS16le | Encoding::PcmF32le);
        assert_eq!(bytes.is_empty(), is_raw, "{encoding:?}");
        let out = decoded(encoding, 24_000, &bytes);
        assert!(out.iter().all(|sample| sample.abs() < 1e-3), "{encoding:?}");
    }
}

/// FLAC loses nothing, and its last, short block neither.
#[test]
fn flac_is_lossless_to_the_last_sample() {
    let samples = signal(24_000, 640 * 3 + 57);
    let (parts, _) = encoded(spec(Encoding::Flac, 24_000, 1.0), &[&samples]);
    let out = decoded(Encoding::Flac, 24_000, &parts.concat());
    let want: Vec<f32> = samples
        .iter()
        .map(|sample| f32::from(s16_from_f32(*sample)) / 32767.0)
        .collect();
    assert_eq!(out, want);
    let (parts, _) = encoded(spec(Encoding::Flac, 24_000, 1.0), &[&samples[..641]]);
    let out = decoded(Encoding::Flac, 24_000, &parts.concat());
    assert_eq!(out[..641], want[..641]);
    assert_eq!(out[641..], [0.0; 31], "silence fills the shortest frame");
}

#[test]
fn floats_pass_through_only_where_nothing_changes_them() {
    for (encoding, rate, speed, want) in [
        (Encoding::PcmF32le, 24_000, 1.0, true),
        (Encoding::PcmF32le, 16_000, 1.0, false),
        (Encoding::PcmF32le, 24_000, 1.5, false),
        (Encoding::PcmS16le, 24_000, 1.0, false),
    ] {
        let encoder = AudioEncoder::new(spec(encoding, rate, speed), 24_000).unwrap();
        assert_eq!(encoder.passes_through(), want);
    }
}

#[test]
fn what_a_format_does_not_carry_is_refused() {
    for encoding in [Encoding::OggOpus, Encoding::Mp3] {
        let refused = AudioEncoder::new(spec(encoding, 96_000, 1.0), 24_000).unwrap_err();
        assert!(matches!(refused, EncodeError::Rate { .. }), "{refused}");
    }
    assert!(AudioEncoder::new(spec(Encoding::Wav, 24_000, 5.0), 24_000).is_err());
}

/// Samples that no loudspeaker plays neither panic nor spoil what follows.
#[test]
fn samples_that_are_no_samples_are_survived() {
    let mut samples = signal(24_000, 9_600);
    samples[100] = f32::NAN;
    samples[200] = f32::INFINITY;
    samples[300] = -1e30;
    for encoding in ALL {
        encoded(spec(encoding, 24_000, 1.0), &[&samples]);
    }
}
