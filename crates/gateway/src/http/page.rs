//! The page at `/`, on which a text can be heard.

use axum::http::header;
use axum::response::IntoResponse;

const PAGE: &str = include_str!("page/index.html");

/// Nothing is loaded from elsewhere, and nothing may be.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page, whole.
pub(crate) async fn page() -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE)
}
