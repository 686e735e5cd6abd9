//! Language codes as Riva's clients write them, and the languages that models name.

use crate::facts::ModelFacts;

/// Languages with the codes that ask for them, the usual one first. A model speaks one form of a language, so a code
/// for another region's is not among them.
const LANGUAGES: [(&str, &[&str]); 10] = [
    ("chinese", &["zh-CN"]),
    ("english", &["en-US"]),
    ("french", &["fr-FR"]),
    ("german", &["de-DE"]),
    ("italian", &["it-IT"]),
    ("japanese", &["ja-JP"]),
    ("korean", &["ko-KR"]),
    ("portuguese", &["pt-BR", "pt-PT"]),
    ("russian", &["ru-RU"]),
    ("spanish", &["es-ES", "es-US"]),
];

/// Codes that a model takes. A language without a code goes by its name.
pub(super) fn codes(model: &ModelFacts) -> Vec<String> {
    let mut codes = Vec::new();
    for language in &model.languages {
        match LANGUAGES
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(language))
        {
            Some((_, known)) => codes.extend(known.iter().map(|code| (*code).to_owned())),
            None => codes.push(language.clone()),
        }
    }
    codes
}

/// The model's language of a code: `en-US`, `en`, or the language's own name. `None` when it has no such.
pub(super) fn language(code: &str, model: &ModelFacts) -> Option<String> {
    let asks_for = |name: &str| {
        let known = LANGUAGES.iter().find(|(each, _)| each.eq_ignore_ascii_case(name));
        let codes = known.map_or(&[][..], |(_, codes)| codes);
        name.eq_ignore_ascii_case(code)
            || codes.iter().any(|each| {
                let primary = each.split('-').next().unwrap_or(each);
                each.eq_ignore_ascii_case(code) || primary.eq_ignore_ascii_case(code)
            })
    };
    model.languages.iter().find(|name| asks_for(name)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::tests::stated;
    use laneway_proto::v1;

    fn model() -> ModelFacts {
        let facts = v1::ModelFacts {
            languages: vec!["English".into(), "portuguese".into(), "sichuan_dialect".into()],
            ..stated()
        };
        facts.try_into().unwrap()
    }

    #[track_caller]
    fn check(code: &str, wanted: Option<&str>) {
        assert_eq!(language(code, &model()).as_deref(), wanted, "{code}");
    }

    #[test]
    fn codes_become_the_models_own_words() {
        check("en-US", Some("English"));
        check("EN-us", Some("English"));
        check("en", Some("English"));
        check("english", Some("English"));
        check("pt-PT", Some("portuguese"));
        check("sichuan_dialect", Some("sichuan_dialect"));
        check("en-GB", None);
        check("de-DE", None);
        check("", None);
        check("e", None);
    }

    #[test]
    fn every_listed_code_is_taken() {
        let codes = codes(&model());
        assert_eq!(codes, ["en-US", "pt-BR", "pt-PT", "sichuan_dialect"]);
        for code in codes {
            assert!(language(&code, &model()).is_some(), "{code}");
        }
    }
}
