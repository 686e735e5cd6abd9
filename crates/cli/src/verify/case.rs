//! The cases that the golden generator makes, and how each is asked for.

/// Kind of checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    CustomVoice,
    VoiceDesign,
    Base,
}

impl Kind {
    /// As in directory and preset names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::CustomVoice => "custom_voice",
            Kind::VoiceDesign => "voice_design",
            Kind::Base => "base",
        }
    }
}

/// What the manifest does not say of a case.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// The text stands whole in front of the frames.
    pub(super) whole_text: bool,
    /// Drawn, so that only processed scores along the reference's codes can be compared.
    pub(super) sampled: bool,
    /// The clip of `audio_frontend.safetensors` that it clones.
    pub(super) clip: Option<&'static str>,
}

const fn case(name: &'static str, kind: Kind, whole_text: bool) -> Case {
    Case {
        name,
        kind,
        whole_text,
        sampled: false,
        clip: None,
    }
}

const fn clone(name: &'static str, whole_text: bool, clip: &'static str) -> Case {
    Case {
        clip: Some(clip),
        ..case(name, Kind::Base, whole_text)
    }
}

/// Every case, in the generator's order.
pub(super) const CASES: [Case; 11] = [
    case("cv_stream_en", Kind::CustomVoice, false),
    case("cv_full_dialect_instruct", Kind::CustomVoice, true),
    case("cv_eos", Kind::CustomVoice, false),
    case("cv_min_new", Kind::CustomVoice, false),
    Case {
        sampled: true,
        ..case("cv_sample", Kind::CustomVoice, true)
    },
    case("vd_full", Kind::VoiceDesign, true),
    case("vd_stream", Kind::VoiceDesign, false),
    clone("xvec", false, "short"),
    clone("icl_text_longer", false, "short"),
    clone("icl_codes_longer", false, "long"),
    clone("icl_full", true, "short"),
];
