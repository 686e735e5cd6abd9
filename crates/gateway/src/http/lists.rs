//! `GET /v1/models` and `GET /v1/audio/voices`.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use laneway_proto::{ErrorCode, Failure};
use serde_json::{Value, json};

use super::error::HttpError;
use crate::api::Api;
use crate::facts::{ModelFacts, Voice};
use crate::validate::{find_model, shortened};

fn list(data: Vec<Value>) -> Json<Value> {
    Json(json!({ "object": "list", "data": data }))
}

/// Beside what the API has: what a caller may ask of the model. When it was made is not known here.
fn model_object(api: &Api, model: &ModelFacts) -> Value {
    let voices: Vec<_> = model.voices.iter().map(|voice| &voice.name).collect();
    json!({
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "laneway",
        "voices": voices,
        "languages": model.languages,
        "sample_rate": model.sample_rate,
        "max_input_chars": api.max_text_chars,
        "takes_instructions": model.takes_instruct,
        "needs_reference": model.takes_reference,
    })
}

/// A registered voice has an id beside its name, and a time.
fn voice_object(voice: &Voice, model: &ModelFacts) -> Value {
    let mut object = json!({
        "id": voice.name,
        "object": "audio.voice",
        "name": voice.name,
        "model": model.name,
        "language": voice.language,
        "dialect": voice.dialect,
    });
    if let Some(registered) = &voice.registered {
        object["id"] = registered.id.as_str().into();
        object["created_at"] = registered.created_at.into();
    }
    object
}

/// The models that are served.
pub(crate) async fn models(State(api): State<Api>) -> Json<Value> {
    let models = api.models();
    list(models.iter().map(|model| model_object(&api, model)).collect())
}

/// One of them.
pub(crate) async fn model(
    State(api): State<Api>,
    Path(name): Path<String>,
) -> Result<Json<Value>, HttpError> {
    let model = find_model(&name, &api.models()).map_err(HttpError::refused)?;
    Ok(Json(model_object(&api, &model)))
}

/// The voices of the models that are served, or of the one that `?model=` names.
pub(crate) async fn voices(
    State(api): State<Api>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<Value>, HttpError> {
    let Ok(Query(query)) = query else {
        let failure = Failure::new(ErrorCode::InvalidArgument, "the query cannot be read");
        return Err(HttpError::refused(failure));
    };
    let mut models = api.models();
    for (name, value) in query {
        if name != "model" {
            let problem = "there is no such parameter; there are: model";
            let failure = Failure::of_field(ErrorCode::UnsupportedField, shortened(&name), problem);
            return Err(HttpError::refused(failure));
        }
        models = vec![find_model(&value, &models).map_err(HttpError::refused)?];
    }
    let data = models
        .iter()
        .flat_map(|model| model.voices.iter().map(|voice| voice_object(voice, model)));
    Ok(list(data.collect()))
}
