//! A request to register a voice, checked. All violations are answered at once.

use std::sync::Arc;

use laneway_proto::{ErrorCode, Failure, samples_to_bytes, v1};

use super::Clip;
use super::clip;
use super::file::ID_PREFIX;
use crate::caller::KeyName;
use crate::facts::ModelFacts;
use crate::routing::RETRY_AFTER;
use crate::validate::{Violations, check_text, find_model, read_reference};

/// Longest name.
const MAX_NAME_CHARS: usize = 64;

/// Longest statement of consent.
const MAX_CONSENT_CHARS: usize = 1000;

/// A voice that may be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(super) name: String,
    pub(super) consent: String,
    /// Name of the API key that it comes with.
    pub(super) owner: KeyName,
    pub(super) clip: Clip,
}

/// Check a request of `owner` against the models that are served: the clip has to be one that the model takes.
///
/// # Errors
/// One failure with every violation; `NoWorker` when nothing is served at all.
pub(crate) fn checked(
    request: v1::RegisterVoiceRequest,
    owner: KeyName,
    models: &[Arc<ModelFacts>],
) -> Result<Registration, Failure> {
    let model = cloning_model(&request.model, models)?;
    let mut violations = Violations::default();
    check_name(&request.name, models, &mut violations);
    check_consent(&request.consent, &mut violations);
    let clip = match request.clip {
        None => {
            let problem = "send the clip that the voice is to be cloned from";
            violations.add(ErrorCode::InvalidArgument, "clip", problem);
            None
        }
        Some(clip) => read_reference(clip, "clip", &model, &mut violations),
    };
    if let Some((clip, _)) = &clip
        && let Err(unfit) = clip::check(&clip.samples, clip.sample_rate)
    {
        violations.add(ErrorCode::InvalidArgument, "clip.audio", unfit.to_string());
    }
    violations.into_result()?;
    let (clip, text) = clip.ok_or_else(Failure::internal)?;
    Ok(Registration {
        name: request.name,
        consent: request.consent.trim().to_owned(),
        owner,
        clip: Clip {
            audio: samples_to_bytes(&clip.samples),
            sample_rate: clip.sample_rate,
            text,
        },
    })
}

/// The model whose limits count.
fn cloning_model(name: &str, models: &[Arc<ModelFacts>]) -> Result<Arc<ModelFacts>, Failure> {
    if models.is_empty() {
        let failure = Failure::new(ErrorCode::NoWorker, "no worker serves at the moment");
        return Err(failure.retry_after(RETRY_AFTER));
    }
    let cloning: Vec<_> = models
        .iter()
        .filter(|model| model.takes_reference)
        .cloned()
        .collect();
    if cloning.is_empty() {
        let problem = "no model that is served clones voices";
        return Err(Failure::of_field(ErrorCode::UnsupportedField, "clip", problem));
    }
    find_model(name, &cloning)
}

/// A name stands in URLs, behind a model's in Riva's names of voices, and in lists: it is plain, and means one voice.
fn check_name(name: &str, models: &[Arc<ModelFacts>], violations: &mut Violations) {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let taken = |model: &Arc<ModelFacts>| {
        model.name.eq_ignore_ascii_case(name)
            || model
                .voices
                .iter()
                .any(|voice| voice.name.eq_ignore_ascii_case(name))
    };
    let problem = if name.is_empty() || name.chars().count() > MAX_NAME_CHARS || !name.chars().all(plain) {
        format!("it is not 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ -")
    } else if name.to_ascii_lowercase().starts_with(ID_PREFIX) {
        format!("names that begin with \"{ID_PREFIX}\" are ids; choose another")
    } else if models.iter().any(taken) {
        "a model or one of its voices is called so; choose another".to_owned()
    } else {
        return;
    };
    violations.add(ErrorCode::InvalidArgument, "name", problem);
}

fn check_consent(consent: &str, violations: &mut Violations) {
    check_text("consent", consent, violations);
    let n_chars = consent.chars().count();
    if consent.trim().is_empty() {
        let problem = "say who agreed that this voice is cloned, or where that is recorded";
        violations.add(ErrorCode::InvalidArgument, "consent", problem);
    } else if n_chars > MAX_CONSENT_CHARS {
        let problem = format!("{n_chars} characters are over the limit of {MAX_CONSENT_CHARS}");
        violations.add(ErrorCode::InvalidArgument, "consent", problem);
    }
}
