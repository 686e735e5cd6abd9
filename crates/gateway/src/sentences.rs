//! Where a text may be cut: at the ends of its sentences.
//!
//! Owns: the text of one stream that was sent and is not yet spoken. A language model sends its text in pieces of a
//! few letters, and how it was cut must not change what is spoken. So a place is decided only when no text that may
//! follow could change the decision: `3.` waits for its next letter, and `Dr. ` for the word behind it. What is
//! looked at is bounded, by the longest part and by [`LOOKAHEAD_CHARS`].
//!
//! Case, digits and a short list of abbreviations decide. Where they leave a doubt the sentence goes on: two
//! sentences spoken as one sound better than one that is broken in two.

mod abbreviations;

#[cfg(test)]
mod tests;

use abbreviations::{is_abbreviation, is_numeric_abbreviation};

/// How far beyond the longest part the text is looked at, in characters.
const LOOKAHEAD_CHARS: usize = 64;

/// Text that has something to speak.
pub(crate) fn is_speakable(text: &str) -> bool {
    text.chars().any(char::is_alphanumeric)
}

/// A whole text in parts of whole sentences, each of at most `max_chars` characters and as long as possible. A
/// sentence that is longer is cut at a pause or between words. Parts with nothing to speak are left out.
pub(crate) fn parts(text: &str, max_chars: usize) -> Vec<String> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let mut taken = 0;
        let mut n_chars = 0;
        while let Some(end) = first_part(&rest[taken..], max_chars, More::None) {
            let more = rest[taken..taken + end].chars().count();
            if taken > 0 && n_chars + more > max_chars {
                break;
            }
            taken += end;
            n_chars += more;
        }
        let part = rest[..taken].trim();
        if is_speakable(part) {
            parts.push(part.to_owned());
        }
        rest = rest[taken..].trim_start();
    }
    parts
}

/// The text of one stream, piece by piece in and sentence by sentence out.
#[derive(Debug)]
pub(crate) struct Sentences {
    /// Starts with no white space.
    text: String,
    n_chars: usize,
    max_chars: usize,
}

impl Sentences {
    /// No text yet. A sentence of more than `max_chars` characters comes out in several.
    pub(crate) fn new(max_chars: usize) -> Self {
        Self {
            text: String::new(),
            n_chars: 0,
            max_chars: max_chars.max(1),
        }
    }

    /// The next piece of the text.
    pub(crate) fn push(&mut self, piece: &str) {
        let piece = if self.text.is_empty() {
            piece.trim_start()
        } else {
            piece
        };
        self.text.push_str(piece);
        self.n_chars += piece.chars().count();
    }

    /// Characters that wait.
    pub(crate) fn n_chars(&self) -> usize {
        self.n_chars
    }

    /// Take the next sentence, if it is known where it ends whatever follows.
    pub(crate) fn next_sentence(&mut self) -> Option<String> {
        self.take(More::Maybe)
    }

    /// Take the next sentence of a text that ends here. Call it until there is none: then nothing waits.
    pub(crate) fn next_of_rest(&mut self) -> Option<String> {
        self.take(More::None)
    }

    /// Forget everything that waits.
    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.n_chars = 0;
    }

    fn take(&mut self, more: More) -> Option<String> {
        loop {
            let end = first_part(&self.text, self.max_chars, more)?;
            let sentence = self.text[..end].trim_end().to_owned();
            let kept = self.text[end..].trim_start();
            self.n_chars = kept.chars().count();
            self.text = kept.to_owned();
            if is_speakable(&sentence) {
                return Some(sentence);
            }
        }
    }
}

/// What is known of the text behind the text at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum More {
    /// Anything may follow, or nothing.
    Maybe,
    /// Nothing follows.
    None,
}

/// Whether a place is an end of a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It is, behind so many bytes.
    End(usize),
    /// It is not.
    No,
    /// What follows decides.
    Open,
}

/// Bytes of the first part of `text`: a sentence, or as much of one as `max_chars` allows. `None` when it is not
/// known yet, or there is no text.
///
/// Once `Some`, the answer is the same for every text that begins with `text`.
fn first_part(text: &str, max_chars: usize, more: More) -> Option<usize> {
    // Nothing behind the window is looked at, so what lies there cannot change the answer.
    let window = prefix(text, max_chars + LOOKAHEAD_CHARS);
    let full = window.len() < text.len() || window.chars().count() == max_chars + LOOKAHEAD_CHARS;
    let closed = full || more == More::None;
    let longest = prefix(window, max_chars).len();
    let mut speakable = false;
    let mut at = 0;
    while let Some(mark) = window[at..].chars().next() {
        speakable |= mark.is_alphanumeric();
        match verdict(window, at, closed) {
            // Marks alone belong to the sentence that they introduce.
            Verdict::End(end) if speakable && end <= longest => return Some(end),
            Verdict::Open => return None,
            Verdict::End(_) | Verdict::No => {}
        }
        at += mark.len_utf8();
        if at >= longest {
            break;
        }
    }
    if !closed || window.is_empty() {
        return None;
    }
    if longest == window.len() && longest == text.len() {
        return Some(longest);
    }
    Some(forced(window, longest))
}

/// The first `n_chars` characters.
fn prefix(text: &str, n_chars: usize) -> &str {
    match text.char_indices().nth(n_chars) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// Is there an end of a sentence whose first mark is at `at`? With `closed`, what follows the text is nothing that
/// matters.
fn verdict(text: &str, at: usize, closed: bool) -> Verdict {
    let Some(first) = text[at..].chars().next() else {
        return Verdict::No;
    };
    if first == '\n' {
        return paragraph(text, at, closed);
    }
    // A run of marks is judged once, where it begins.
    if !is_mark(first) || text[..at].chars().next_back().is_some_and(is_mark) {
        return Verdict::No;
    }
    let marks_end = skip(text, at, is_mark);
    let end = skip(text, marks_end, is_closer);
    let undecided = if closed { Verdict::End(end) } else { Verdict::Open };
    let Some(next) = text[end..].chars().next() else {
        return undecided;
    };
    let marks = &text[at..marks_end];
    let unambiguous = marks.chars().any(is_unambiguous);
    let before = text[..at].chars().next_back();
    if !next.is_whitespace() {
        // `3.14`, `example.com` and `what?no` go on; scripts without spaces do not need one.
        let wide_digits = marks == "．" && next.is_numeric();
        // `「はい。」と言った`
        let quoted = end > marks_end && next.is_alphanumeric();
        let unspaced = (unambiguous && !wide_digits && !quoted)
            || (is_unspaced(next)
                && (has_question(marks) || (marks == "." && before.is_some_and(is_unspaced))));
        return if unspaced { Verdict::End(end) } else { Verdict::No };
    }
    if unambiguous || is_blank_line(&text[end..skip(text, end, char::is_whitespace)]) {
        return Verdict::End(end);
    }
    let Some(following) = text[end..].chars().find(|c| !c.is_whitespace() && !is_opener(*c)) else {
        return undecided;
    };
    let goes_on = is_mark(following)
        || if has_question(marks) {
            // `"Stop!" he said.`
            following.is_lowercase() && end > marks_end
        } else if marks == "." {
            following.is_lowercase() || is_part_of_word(&text[..at], following)
        } else {
            following.is_lowercase()
        };
    if goes_on { Verdict::No } else { Verdict::End(end) }
}

/// A blank line ends a sentence without any mark: a heading, an item of a list.
fn paragraph(text: &str, at: usize, closed: bool) -> Verdict {
    // Judged where the white space begins.
    if text[..at].chars().next_back().is_some_and(char::is_whitespace) {
        let begin = text[..at].trim_end().len();
        if text[begin..at].contains('\n') {
            return Verdict::No;
        }
    }
    let end = skip(text, at, char::is_whitespace);
    if is_blank_line(&text[at..end]) {
        return Verdict::End(at);
    }
    if end == text.len() && !closed {
        return Verdict::Open;
    }
    Verdict::No
}

fn is_blank_line(white_space: &str) -> bool {
    white_space.chars().filter(|c| *c == '\n').count() > 1
}

/// Whether the full stop behind `before` belongs to the word there: an abbreviation, an initial, an ordinal.
fn is_part_of_word(before: &str, following: char) -> bool {
    // An apostrophe is a letter here, not a quote.
    let parts_words = |c: char| c.is_whitespace() || c == '-' || (is_opener(c) && c != '\'');
    let word = before.rsplit(parts_words).next().unwrap_or(before);
    let word = word.trim_start_matches('\'');
    let mut letters = word.chars();
    let (first, second) = (letters.next(), letters.next());
    match (first, second) {
        (None, _) => false,
        // `J. Smith`, but `you and I. Then`.
        (Some(only), None) if only.is_alphabetic() => only != 'I' && !is_unspaced(only),
        _ if word.chars().all(|c| c.is_ascii_digit()) => word.len() < 3,
        // `U.S`, `e.g`, `z.B`
        _ if word.contains('.') => word
            .split('.')
            .all(|part| part.chars().count() == 1 && part.chars().all(char::is_alphabetic)),
        _ => is_abbreviation(word) || (following.is_numeric() && is_numeric_abbreviation(word)),
    }
}

/// Where to cut a sentence that is too long: behind the last pause, else the last word, else the last character
/// that stands on its own, within `longest` bytes.
fn forced(text: &str, longest: usize) -> usize {
    let head = &text[..longest];
    let follows = |end: usize| text[end..].chars().next();
    let ends = |wanted: fn(char) -> bool| {
        head.char_indices()
            .rev()
            .filter(move |(_, c)| wanted(*c))
            .map(|(index, c)| index + c.len_utf8())
    };
    let speakable = |end: &usize| is_speakable(&head[..*end]);
    let pause = ends(is_pause)
        .filter(speakable)
        .find(|end| follows(*end).is_some_and(|next| next.is_whitespace() || is_unspaced(next)));
    // A pause at the very start would leave a stub.
    if let Some(end) = pause.filter(|end| *end >= longest / 4) {
        return end;
    }
    if follows(longest).is_some_and(char::is_whitespace) {
        return longest;
    }
    if let Some(end) = ends(char::is_whitespace).find(speakable) {
        return end;
    }
    // Marks that combine with the character before them go with it.
    let alone = |end: &usize| follows(*end).is_none_or(|next| !is_joined(next));
    std::iter::once(longest)
        .chain(head.char_indices().rev().map(|(index, _)| index))
        .find(|end| *end > 0 && alone(end))
        .unwrap_or(longest)
}

fn skip(text: &str, from: usize, wanted: impl Fn(char) -> bool) -> usize {
    text[from..]
        .char_indices()
        .find(|(_, c)| !wanted(*c))
        .map_or(text.len(), |(index, _)| from + index)
}

fn has_question(marks: &str) -> bool {
    marks.contains(['!', '?', '‽'])
}

/// A mark that may end a sentence.
fn is_mark(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…' | '⋯' | '‽') || is_unambiguous(c)
}

/// A mark that ends a sentence wherever it stands.
fn is_unambiguous(c: char) -> bool {
    matches!(
        c,
        '。' | '｡' | '！' | '？' | '．' | '؟' | '۔' | '।' | '॥' | '။' | '។' | '።' | '։'
    )
}

/// Closes what a sentence is wrapped in, behind its mark.
fn is_closer(c: char) -> bool {
    matches!(
        c,
        '"' | '\''
            | '”'
            | '’'
            | ')'
            | ']'
            | '}'
            | '»'
            | '›'
            | '」'
            | '』'
            | '）'
            | '】'
            | '》'
            | '〉'
            | '＂'
    )
}

fn is_opener(c: char) -> bool {
    matches!(
        c,
        '"' | '\''
            | '“'
            | '‘'
            | '„'
            | '('
            | '['
            | '{'
            | '«'
            | '‹'
            | '¿'
            | '¡'
            | '「'
            | '『'
            | '（'
            | '【'
            | '《'
            | '*'
            | '_'
    )
}

/// Where a voice may rest inside a sentence.
fn is_pause(c: char) -> bool {
    matches!(
        c,
        ',' | ';' | ':' | '—' | '–' | '，' | '、' | '；' | '：' | '،' | ')' | '）'
    )
}

/// Chinese and Japanese: written without spaces.
fn is_unspaced(c: char) -> bool {
    matches!(
        u32::from(c),
        0x2E80..=0x2FDF | 0x3005..=0x3007 | 0x3040..=0x30FF | 0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF
            | 0xFF66..=0xFF9F | 0x2_0000..=0x3_FFFF
    )
}

/// Combines with the character before it: accents, variation selectors, joiners, skin tones.
fn is_joined(c: char) -> bool {
    matches!(
        u32::from(c),
        0x0300..=0x036F | 0x0483..=0x0489 | 0x0591..=0x05BD | 0x064B..=0x065F | 0x093A..=0x094D | 0x0E31..=0x0E3A
            | 0x1AB0..=0x1AFF | 0x1DC0..=0x1DFF | 0x200C..=0x200D | 0x20D0..=0x20FF | 0x3099..=0x309A
            | 0xFE00..=0xFE0F | 0xFE20..=0xFE2F | 0x1_F3FB..=0x1_F3FF | 0xE_0100..=0xE_01EF
    )
}
