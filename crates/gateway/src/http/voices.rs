//! `POST /v1/audio/voices` and `DELETE /v1/audio/voices/{voice}`.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, header};
use axum::{Extension, Json};
use bytes::Bytes;
use futures::stream;
use laneway_proto::{ErrorCode, Failure, v1};
use multer::Multipart;
use serde_json::{Value, json};

use super::error::HttpError;
use super::headers;
use super::speech::read;
use crate::api::Api;
use crate::caller::KeyName;
use crate::validate::{Violations, shortened};

/// Every field that is taken. The last two are Laneway's own.
const FIELDS: [&str; 5] = ["name", "audio_sample", "consent", "ref_text", "model"];

/// Until the body has arrived: a clip over a slow line.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Keep a clip as a voice.
pub(crate) async fn register(State(api): State<Api>, request: Request) -> Result<Json<Value>, HttpError> {
    let (parts, body) = request.into_parts();
    let boundary = boundary(&parts.headers).map_err(HttpError::refused)?;
    let caller = headers::caller(&parts).map_err(HttpError::refused)?;
    let place = api.enter_registration(caller.key)?;
    let body = read(&parts.headers, body, api.max_request_bytes, BODY_TIMEOUT)
        .await
        .map_err(HttpError::refused)?;
    let request = parse(body, boundary).await.map_err(HttpError::refused)?;
    let voice = api.register_voice(place, request).await.map_err(renamed)?;
    Ok(Json(json!({
        "id": voice.id,
        "object": "audio.voice",
        "name": voice.name,
        "created_at": voice.created_at,
    })))
}

/// Forget a voice.
pub(crate) async fn forget(
    State(api): State<Api>,
    Path(voice): Path<String>,
    key: Option<Extension<KeyName>>,
) -> Result<Json<Value>, HttpError> {
    let Extension(key) = key.unwrap_or_default();
    let deleted = api.delete_voice(voice, &key).await?;
    Ok(Json(json!({
        "id": deleted.id,
        "object": "audio.voice.deleted",
        "deleted": true,
    })))
}

/// The names of this API.
fn renamed(mut failure: Failure) -> HttpError {
    for violation in &mut failure.violations {
        let name = match violation.field.as_str() {
            "clip" | "clip.audio" => "audio_sample",
            "clip.text" => "ref_text",
            _ => continue,
        };
        violation.field = name.to_owned();
    }
    failure.into()
}

fn boundary(headers: &HeaderMap) -> Result<String, Failure> {
    let media_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("");
    multer::parse_boundary(media_type).map_err(|_| {
        let problem = "the body is to be a form with a file; send it as multipart/form-data with a boundary";
        Failure::new(ErrorCode::UnsupportedMediaType, problem)
    })
}

/// Read the form, field by field: each has an effect or is refused by name.
async fn parse(body: Bytes, boundary: String) -> Result<v1::RegisterVoiceRequest, Failure> {
    let body = stream::iter([Ok::<_, Infallible>(body)]);
    let mut form = Multipart::new(body, boundary);
    let unreadable = |error: multer::Error| {
        let problem = format!("the form cannot be read: {error}");
        Failure::new(ErrorCode::InvalidArgument, problem)
    };
    let mut violations = Violations::default();
    let mut request = v1::RegisterVoiceRequest::default();
    let mut clip = v1::ReferenceClip::default();
    let mut seen: Vec<&str> = Vec::new();
    while let Some(field) = form.next_field().await.map_err(unreadable)? {
        let name = field.name().unwrap_or_default().to_owned();
        let Some(name) = FIELDS.iter().find(|known| **known == name) else {
            let problem = format!("there is no such field; there are: {}", FIELDS.join(", "));
            violations.add(ErrorCode::UnsupportedField, &shortened(&name), problem);
            continue;
        };
        if seen.contains(name) {
            violations.add(ErrorCode::InvalidArgument, name, "it is there twice");
            continue;
        }
        seen.push(name);
        let bytes = field.bytes().await.map_err(unreadable)?;
        if *name == "audio_sample" {
            clip.audio = bytes;
            continue;
        }
        let Ok(text) = String::from_utf8(bytes.into()) else {
            violations.add(ErrorCode::InvalidArgument, name, "it is not UTF-8");
            continue;
        };
        match *name {
            "name" => request.name = text,
            "consent" => request.consent = text,
            "ref_text" => clip.text = text,
            _ => request.model = text,
        }
    }
    if !seen.contains(&"audio_sample") {
        let problem = "send the clip that the voice is to be cloned from, as a WAV file";
        violations.add(ErrorCode::InvalidArgument, "audio_sample", problem);
    }
    violations.into_result()?;
    request.clip = Some(clip);
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, value: &str) -> String {
        format!("--B\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    }

    async fn parsed(parts: &[String]) -> Result<v1::RegisterVoiceRequest, Failure> {
        parse(Bytes::from(format!("{}--B--\r\n", parts.concat())), "B".into()).await
    }

    #[tokio::test]
    async fn every_field_has_an_effect() {
        let parts = FIELDS.map(|name| part(name, &format!("the {name}")));
        let want = v1::RegisterVoiceRequest {
            name: "the name".into(),
            consent: "the consent".into(),
            model: "the model".into(),
            clip: Some(v1::ReferenceClip {
                audio: "the audio_sample".into(),
                text: "the ref_text".into(),
                sample_rate: 0,
            }),
        };
        assert_eq!(parsed(&parts).await.unwrap(), want);
    }

    #[tokio::test]
    async fn what_has_no_effect_is_refused_by_name_and_all_at_once() {
        let parts = [part("name", "a"), part("name", "b"), part("file", "x")];
        let failure = parsed(&parts).await.unwrap_err();
        let named: Vec<_> = failure
            .violations
            .iter()
            .map(|each| each.field.as_str())
            .collect();
        assert_eq!(named, ["name", "file", "audio_sample"], "{failure}");
        for broken in [
            "",
            "--B\r\n",
            "--B\r\ncontent-disposition: form-data; name=\"name\"\r\n\r\nhalf",
        ] {
            let failure = parse(Bytes::from(broken.to_owned()), "B".into())
                .await
                .unwrap_err();
            assert_eq!(failure.code, ErrorCode::InvalidArgument, "{failure}");
        }
    }

    #[test]
    fn only_a_form_has_a_boundary() {
        let refused = |media_type: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, media_type.parse().unwrap());
            boundary(&headers).map_err(|failure| failure.code)
        };
        assert_eq!(refused("multipart/form-data; boundary=B"), Ok("B".into()));
        for media_type in ["", "application/json", "multipart/form-data"] {
            assert_eq!(
                refused(media_type),
                Err(ErrorCode::UnsupportedMediaType),
                "{media_type}"
            );
        }
    }
}
