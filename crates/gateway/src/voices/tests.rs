use super::*;
use crate::facts::tests::stated;
use laneway_audio::wav_file;
use laneway_proto::v1;
use std::os::unix::fs::PermissionsExt as _;

fn config(directory: &Path) -> VoicesConfig {
    VoicesConfig {
        directory: directory.to_owned(),
        max_voices: NonZeroUsize::new(3).unwrap(),
        max_bytes: 1 << 20,
    }
}

fn cloning() -> Arc<ModelFacts> {
    let facts = v1::ModelFacts {
        voices: vec![],
        takes_reference: true,
        ..stated()
    };
    Arc::new(facts.try_into().unwrap())
}

fn tone(n_samples: usize) -> Vec<f32> {
    (0..n_samples)
        .map(|index| 0.3 * (index as f32 * 0.06).sin())
        .collect()
}

/// A good request for a voice of this name, from a clip of so many samples.
fn request(name: &str, n_samples: usize) -> v1::RegisterVoiceRequest {
    v1::RegisterVoiceRequest {
        name: name.into(),
        clip: Some(v1::ReferenceClip {
            audio: wav_file(&tone(n_samples), 24_000).unwrap().into(),
            sample_rate: 0,
            text: "Over there.".into(),
        }),
        consent: "Ada, on paper, in the archive".into(),
        model: String::new(),
    }
}

fn register(voices: &Voices, name: &str, n_samples: usize) -> Result<Arc<Registered>, Failure> {
    register_of("", voices, name, n_samples)
}

/// The same of a caller with this key.
fn register_of(key: &str, voices: &Voices, name: &str, n_samples: usize) -> Result<Arc<Registered>, Failure> {
    voices.register(checked(
        request(name, n_samples),
        KeyName::new(key),
        &[cloning()],
    )?)
}

fn delete(voices: &Voices, name: &str) -> Result<Arc<Registered>, Failure> {
    voices.delete(name, &KeyName::default())
}

fn files(directory: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut all: Vec<_> = fs::read_dir(directory).unwrap().map(name).collect();
    all.sort();
    all
}

#[test]
fn voices_survive_a_restart_and_a_deleted_one_does_not() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("made/as/needed");
    let voices = Voices::open(config(&directory)).unwrap();
    let ada = register(&voices, "Ada", 24_000).unwrap();
    let bob = register(&voices, "bob", 30_000).unwrap();
    assert!(matches!(
        Voices::open(config(&directory)),
        Err(VoicesError::InUse)
    ));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(mode(&directory.join(format!("{}.voice", ada.id))), 0o600);
    drop(voices);

    let voices = Voices::open(config(&directory)).unwrap();
    assert_eq!(*voices.0.all.read(), [ada.clone(), bob.clone()]);
    assert_eq!(voices.find("ADA"), Some(ada.clone()));
    assert_eq!(delete(&voices, &ada.id).unwrap(), ada);
    assert_eq!(delete(&voices, "ada").unwrap_err().code, ErrorCode::UnknownVoice);
    drop(voices);
    let voices = Voices::open(config(&directory)).unwrap();
    assert_eq!(*voices.0.all.read(), std::slice::from_ref(&bob));
    assert_eq!(
        files(&directory),
        ["lock".to_owned(), format!("{}.voice", bob.id)]
    );
}

#[test]
fn a_name_means_one_clip() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    let ada = register(&voices, "ada", 24_000).unwrap();
    assert!(
        Arc::ptr_eq(&register(&voices, "ada", 24_000).unwrap(), &ada),
        "once more changes nothing"
    );
    for (name, n_samples) in [("ada", 24_001), ("ADA", 24_000)] {
        let failure = register(&voices, name, n_samples).unwrap_err();
        assert_eq!(failure.code, ErrorCode::VoiceExists, "{failure}");
    }
    // Under another name it is another voice.
    assert_ne!(register(&voices, "eve", 24_000).unwrap().id, ada.id);
}

#[test]
fn a_voice_is_deleted_by_whom_it_belongs_to_also_after_a_restart() {
    // By whom it was registered, who asks, and whether that is enough.
    for (owner, asks, may) in [
        ("alice", "alice", true),
        ("alice", "bob", false),
        // Nobody is asked for a key, or was when it was registered.
        ("alice", "", true),
        ("", "bob", true),
        ("", "", true),
    ] {
        let place = tempfile::tempdir().unwrap();
        let voices = Voices::open(config(place.path())).unwrap();
        let made = register_of(owner, &voices, "ada", 24_000).unwrap();
        // Whoever says the same once more has the voice, unless it is another's to delete.
        let again = register_of(asks, &voices, "ada", 24_000).map_err(|failure| failure.code);
        assert_eq!(again, may.then_some(made).ok_or(ErrorCode::VoiceExists));
        let taken = register_of(asks, &voices, "ada", 24_001).unwrap_err();
        assert_eq!(taken.code, ErrorCode::VoiceExists);
        assert_eq!(taken.message.contains("delete it first"), may, "{taken}");
        drop(voices);
        let voices = Voices::open(config(place.path())).unwrap();
        let deleted = voices.delete("ada", &KeyName::new(asks));
        let code = deleted.as_ref().map_err(|failure| failure.code).map(|_| ());
        let wanted = may.then_some(()).ok_or(ErrorCode::VoiceOfAnother);
        assert_eq!(code, wanted, "{owner:?}'s, asked by {asks:?}");
        assert_eq!(voices.find("ada").is_none(), may);
    }
}

#[test]
fn a_voice_of_before_owners_were_kept_is_anybodys() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    let ada = register_of("alice", &voices, "ada", 24_000).unwrap();
    drop(voices);
    // As a file of then is: the same without the word.
    let path = place.path().join(format!("{}.voice", ada.id));
    let file = fs::read(&path).unwrap();
    let owner = br#","owner":"alice""#;
    let at = file.windows(owner.len()).position(|part| part == owner).unwrap();
    fs::write(&path, [&file[..at], &file[at + owner.len()..]].concat()).unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    assert_eq!(voices.delete("ada", &KeyName::new("bob")).unwrap().id, ada.id);
}

#[test]
fn voices_are_bounded_in_number_and_bytes() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    for name in ["a", "b", "c"] {
        register(&voices, name, 24_000).unwrap();
    }
    let full = register(&voices, "d", 24_000).unwrap_err();
    assert_eq!(full.code, ErrorCode::VoicesFull);
    delete(&voices, "b").unwrap();
    register(&voices, "d", 24_000).unwrap();
    for name in ["a", "c"] {
        delete(&voices, name).unwrap();
    }
    // A MiB is 262144 samples, of which 24000 are taken.
    register(&voices, "e", 120_000).unwrap();
    let full = register(&voices, "f", 120_000).unwrap_err();
    assert_eq!(full.code, ErrorCode::VoicesFull);
    assert!(full.message.contains("bytes"), "{full}");
    assert_eq!(files(place.path()).len(), 3, "the lock and two voices");
    drop(voices);

    let mut smaller = config(place.path());
    smaller.max_bytes = 500_000;
    let error = Voices::open(smaller).unwrap_err();
    assert!(error.to_string().contains("it holds 2 voices"), "{error}");
}

#[test]
fn what_is_damaged_or_no_voice_is_left_alone_and_not_served() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    let good = register(&voices, "good", 24_000).unwrap();
    let bad = register(&voices, "bad", 24_000).unwrap();
    drop(voices);
    let path = |name: &str| place.path().join(name);
    let bad_file = path(&format!("{}.voice", bad.id));
    let whole = fs::read(&bad_file).unwrap();
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    fs::write(elsewhere.path(), &whole).unwrap();
    let mut flipped = whole.clone();
    flipped[5000] ^= 1;
    let cases: [(&str, &dyn Fn()); 6] = [
        ("a flipped bit", &|| fs::write(&bad_file, &flipped).unwrap()),
        ("cut short", &|| fs::write(&bad_file, &whole[..9000]).unwrap()),
        ("empty", &|| fs::write(&bad_file, b"").unwrap()),
        ("another name", &|| {
            fs::remove_file(&bad_file).unwrap();
            fs::write(path("voice_0123.voice"), &whole).unwrap();
        }),
        ("a link", &|| {
            std::os::unix::fs::symlink(elsewhere.path(), &bad_file).unwrap()
        }),
        ("a directory and a note", &|| {
            fs::create_dir(path("backup")).unwrap();
            fs::write(path("README"), "mine").unwrap();
        }),
    ];
    for (what, damage) in cases {
        damage();
        fs::write(path("voice_77.part"), &whole).unwrap();
        let voices = Voices::open(config(place.path())).unwrap();
        assert_eq!(*voices.0.all.read(), std::slice::from_ref(&good), "{what}");
        assert!(!path("voice_77.part").exists(), "what was cut short is removed");
        assert!(files(place.path()).len() > 2, "{what}: the file is still there");
    }
}

#[test]
fn what_cannot_be_written_is_not_kept() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("voices");
    let voices = Voices::open(config(&directory)).unwrap();
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(
        register(&voices, "ada", 24_000).unwrap_err().code,
        ErrorCode::Internal
    );
    assert!(voices.find("ada").is_none());
}

#[test]
fn registrations_at_the_same_time_are_few() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    let held: Vec<_> = (0..AT_ONCE).map(|_| voices.enter().unwrap()).collect();
    assert_eq!(voices.enter().unwrap_err().code, ErrorCode::Overloaded);
    drop(held);
    assert!(voices.enter().is_ok());
}

/// A request that was changed by `change` is refused for these fields.
#[track_caller]
fn refused(change: impl FnOnce(&mut v1::RegisterVoiceRequest), fields: &[&str], words: &str) {
    let mut changed = request("ada", 24_000);
    change(&mut changed);
    let failure = checked(changed, KeyName::default(), &[cloning()]).unwrap_err();
    let named: Vec<_> = failure
        .violations
        .iter()
        .map(|each| each.field.as_str())
        .collect();
    assert_eq!(named, fields, "{failure}");
    assert!(failure.to_string().contains(words), "{failure}");
}

#[test]
fn every_field_of_a_registration_is_checked() {
    for name in ["", "../ada", "a/b", "a.b", "ädä", "a b", "a\0", &"a".repeat(65)] {
        refused(|request| request.name = name.into(), &["name"], "A-Z a-z 0-9 _ -");
    }
    refused(|request| request.name = "Voice_01".into(), &["name"], "are ids");
    refused(|request| request.name = "NANO".into(), &["name"], "a model");
    for consent in ["", " \n"] {
        refused(
            |request| request.consent = consent.into(),
            &["consent"],
            "who agreed",
        );
    }
    refused(|request| request.consent = "x".repeat(1001), &["consent"], "1000");
    refused(
        |request| request.consent = "yes\u{1b}".into(),
        &["consent"],
        "U+001B",
    );
    refused(|request| request.clip = None, &["clip"], "send the clip");
    refused(|request| request.model = "other".into(), &["model"], "nano");
    let clip = |change: fn(&mut v1::ReferenceClip)| {
        move |request: &mut v1::RegisterVoiceRequest| change(request.clip.as_mut().unwrap())
    };
    let of = |samples: &[f32], rate| wav_file(samples, rate).unwrap().into();
    refused(
        clip(|clip| clip.audio = b"RIFF".as_slice().into()),
        &["clip.audio"],
        "not a readable WAV",
    );
    refused(clip(|clip| clip.text = "a".repeat(101)), &["clip.text"], "100");
    refused(
        |request| request.clip.as_mut().unwrap().audio = of(&tone(48_000), 48_000),
        &["clip.audio"],
        "48000 Hz",
    );
    refused(
        |request| request.clip.as_mut().unwrap().audio = of(&tone(23_000), 24_000),
        &["clip.audio"],
        "958 ms",
    );
    refused(
        |request| request.clip.as_mut().unwrap().audio = of(&tone(24_000 * 6), 24_000),
        &["clip.audio"],
        "5000 ms",
    );
    refused(
        |request| request.clip.as_mut().unwrap().audio = of(&[0.0; 24_000], 24_000),
        &["clip.audio"],
        "silent",
    );
    // All at once.
    let all = |request: &mut v1::RegisterVoiceRequest| *request = v1::RegisterVoiceRequest::default();
    refused(all, &["name", "consent", "clip"], "who agreed");

    let presets = [Arc::new(stated().try_into().unwrap())];
    let failure = checked(request("ada", 24_000), KeyName::default(), &presets).unwrap_err();
    assert_eq!(failure.code, ErrorCode::UnsupportedField, "{failure}");
    assert_eq!(
        checked(request("ada", 24_000), KeyName::default(), &[])
            .unwrap_err()
            .code,
        ErrorCode::NoWorker
    );
}

#[test]
fn a_model_is_told_of_the_voices_that_it_can_clone() {
    let place = tempfile::tempdir().unwrap();
    let voices = Voices::open(config(place.path())).unwrap();
    register(&voices, "ada", 48_000).unwrap();
    let known = |change: fn(&mut ModelFacts)| {
        let mut model = ModelFacts::clone(&cloning());
        change(&mut model);
        voices.known_to(&Arc::new(model)).voices.len()
    };
    assert_eq!(known(|_| {}), 1);
    assert_eq!(known(|model| model.takes_reference = false), 0);
    assert_eq!(known(|model| model.sample_rate = 16_000), 0);
    assert_eq!(known(|model| model.max_reference_ms = 1999), 0);
}
