//! Words whose full stop is their own.

/// Sorted, in lower case. Words that end a sentence as often as not (`etc`, `jr`) are here too: a sentence that goes
/// on too long is heard less than one that breaks off.
const ABBREVIATIONS: [&str; 85] = [
    "adm", "allg", "approx", "apr", "aug", "ave", "bd", "bldg", "blvd", "brig", "bspw", "bzw", "ca", "capt",
    "cdr", "cf", "cie", "cmdr", "co", "col", "corp", "dec", "dept", "dott", "dr", "dra", "est", "etc",
    "evtl", "feb", "ff", "fr", "ft", "gen", "ggf", "gov", "hon", "hr", "inc", "incl", "inkl", "jan", "jr",
    "jul", "jun", "lt", "ltd", "maj", "messrs", "mio", "mlle", "mme", "mr", "mrd", "mrs", "ms", "mt", "nov",
    "oct", "okt", "ph", "pres", "prof", "pvt", "rd", "rev", "sen", "sep", "sept", "sgt", "sog", "sr", "sra",
    "srta", "st", "ste", "str", "supt", "ud", "uds", "univ", "usw", "vgl", "vs", "zzgl",
];

/// Abbreviations only in front of a number: alone they are words, or ends of sentences.
const NUMERIC_ABBREVIATIONS: [&str; 20] = [
    "abb", "art", "ch", "eq", "fig", "figs", "kap", "no", "nos", "nr", "núm", "op", "p", "pag", "par", "pg",
    "pp", "pág", "sec", "vol",
];

/// A title or another word that its full stop belongs to.
pub(super) fn is_abbreviation(word: &str) -> bool {
    has(&ABBREVIATIONS, word)
}

/// A word that a number follows, `No. 5`.
pub(super) fn is_numeric_abbreviation(word: &str) -> bool {
    has(&NUMERIC_ABBREVIATIONS, word)
}

fn has(sorted: &[&str], word: &str) -> bool {
    sorted.binary_search(&word.to_lowercase().as_str()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_sorted() {
        assert!(ABBREVIATIONS.is_sorted());
        assert!(NUMERIC_ABBREVIATIONS.is_sorted());
    }
}
