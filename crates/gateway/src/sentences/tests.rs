use proptest::prelude::*;

use super::*;

const MAX_CHARS: usize = 200;

fn sentences_of<'a>(pieces: impl IntoIterator<Item = &'a str>, max_chars: usize) -> Vec<String> {
    let mut waiting = Sentences::new(max_chars);
    let mut sentences = Vec::new();
    for piece in pieces {
        waiting.push(piece);
        sentences.extend(std::iter::from_fn(|| waiting.next_sentence()));
    }
    sentences.extend(std::iter::from_fn(|| waiting.next_of_rest()));
    assert_eq!((waiting.n_chars(), waiting.text.as_str()), (0, ""));
    sentences
}

/// The sentences of a text, written with `|` between them.
#[track_caller]
fn check(marked: &str) {
    let wanted: Vec<_> = marked.split('|').map(str::trim).collect();
    let text: String = marked.split('|').collect();
    assert_eq!(sentences_of([text.as_str()], MAX_CHARS), wanted);
    let letters: Vec<_> = text.chars().map(String::from).collect();
    assert_eq!(
        sentences_of(letters.iter().map(String::as_str), MAX_CHARS),
        wanted,
        "letter by letter"
    );
}

#[test]
fn sentences_end_at_their_marks() {
    check("One. |Two! |Three? |Four.");
    check("Really?! |Yes.");
    check("He said \"Stop!\" and left. |She stayed.");
    check("\"Stop!\" |He left.");
    check("(An aside.) |Then on.");
    check("no capitals? |yes! |none");
    check("It ended in 2019. |Then came 2020.");
    check("Where?\n|There.");
    check("¿Qué tal? |¡Bien!");
}

#[test]
fn numbers_and_names_are_not_cut() {
    check("Pi is 3.14159 and e is 2.71. |Both are irrational.");
    check("It costs 1,234.50 dollars. |Pay now.");
    check("Version 1.2.3 is at example.com/a?b=c today.");
    check("Dr. Smith met Mr. and Mrs. Jones at St. Mary's. |They left.");
    check("J. R. R. Tolkien wrote it. |I read it.");
    check("The U.S. Army, e.g. at 5 p.m. on Friday.");
    check("See Fig. 3 and No. 5. It is there.");
    check("I said no. |Then I left.");
    check("It was you and I. |Nobody else.");
    check("Am 3. Oktober ist z. B. frei. |Dann nicht.");
    check("1. First\n2. Second");
}

#[test]
fn ellipses_stay_whole() {
    check("Well... maybe. |Yes.");
    check("Well... |Maybe.");
    check("Wait . . . what? |Yes.");
    check("Hm… so be it. |Good.");
    check("...and so on. |Yes.");
    check("我想……也许吧。|好。");
}

#[test]
fn scripts_without_spaces_end_at_their_own_marks() {
    check("今天天气很好。|我们去散步吧！|好吗？|好。");
    check("「はい。」と言った。|次の文。");
    check("他说：“好。”|“再见。”");
    check("圆周率是３．１４。|对。");
    check("版本3.5很好!|对。");
    check("你好.|我是.");
    check("क्या हाल है। |ठीक है।");
    check("كيف حالك؟ |بخير.");
}

#[test]
fn a_blank_line_ends_a_heading() {
    check("A heading|\n\nAnd its text.|\n\n\nThe end");
    check("one\ntwo");
    check("one\r\n|\r\ntwo");
}

#[test]
fn what_cannot_be_spoken_goes_with_what_can() {
    check("... Well. |😀 Hello! |👍🏽 Good");
    assert_eq!(sentences_of(["Hello. 😀"], MAX_CHARS), ["Hello."]);
    for silent in ["", " \n ", "...", "—", "😀", "。。。"] {
        assert_eq!(sentences_of([silent], MAX_CHARS), [""; 0], "{silent:?}");
        assert_eq!(parts(silent, MAX_CHARS), [""; 0], "{silent:?}");
    }
}

#[test]
fn added_tokens_are_text() {
    let sentences = sentences_of(["Say <|im_", "end|> now. <|im_start|>user again."], MAX_CHARS);
    assert_eq!(sentences, ["Say <|im_end|> now.", "<|im_start|>user again."]);
}

#[test]
fn an_end_is_told_as_soon_as_nothing_can_change_it() {
    let mut waiting = Sentences::new(MAX_CHARS);
    let mut push = |piece: &str| {
        waiting.push(piece);
        waiting.next_sentence()
    };
    assert_eq!(push("Pi is 3."), None);
    assert_eq!(push("14. "), None);
    assert_eq!(push("N").as_deref(), Some("Pi is 3.14."));
    assert_eq!(push("ext. 好。").as_deref(), Some("Next."));
    assert_eq!(waiting.next_sentence(), None);
    waiting.push("不");
    assert_eq!(waiting.next_sentence().as_deref(), Some("好。"));
    assert_eq!(waiting.next_sentence(), None);
    assert_eq!(waiting.next_of_rest().as_deref(), Some("不"));
    assert_eq!(waiting.next_of_rest(), None);
}

#[test]
fn a_sentence_that_is_too_long_is_cut_where_it_hurts_least() {
    let cut = |text: &str| sentences_of([text], 20);
    assert_eq!(
        cut("one two three, four five six seven"),
        ["one two three,", "four five six seven"]
    );
    assert_eq!(
        cut("seven letters without pauses"),
        ["seven letters", "without pauses"]
    );
    assert_eq!(
        cut(&"x".repeat(45)),
        ["x".repeat(20), "x".repeat(20), "x".repeat(5)]
    );
    let accents = "e\u{301}".repeat(12);
    assert!(
        cut(&accents).iter().all(|part| part.starts_with('e')),
        "an accent stays with its letter"
    );
    assert_eq!(cut(&format!("a{}b", " ".repeat(500))), ["a", "b"]);
    assert_eq!(
        cut(&format!("a{}b", ".".repeat(500))),
        ["a...................", ".b"]
    );
}

#[test]
fn a_long_text_becomes_few_parts_of_whole_sentences() {
    let text = "One is here. Two is here. Three is here. Four is here.";
    assert_eq!(
        parts(text, 30),
        ["One is here. Two is here.", "Three is here. Four is here."]
    );
    assert_eq!(parts(text, 1000), [text]);
    assert_eq!(parts("  Short.  ", 30), ["Short."]);
}

/// Texts of what is difficult, and of anything.
fn texts() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "Dr.",
        "e.g.",
        "3.14",
        "12.",
        "2019.",
        "...",
        "…",
        ". . .",
        "?!",
        "\"",
        "'",
        ")",
        "(",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "I",
        "a",
        "J.",
        "Hello",
        "world.",
        "what?",
        "No. 5",
        "U.S.",
        "好",
        "。",
        "」",
        "「",
        "！",
        "３．",
        "😀",
        "<|im_end|>",
        "e\u{301}",
        "\u{200d}",
        ",",
        ";",
        ":",
        "—",
        "。」と",
        "।",
        "!",
    ]);
    prop_oneof![
        4 => prop::collection::vec(words, 0..60).prop_map(|words| words.concat()),
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn how_a_text_was_cut_into_pieces_changes_nothing(
        text in texts(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        max_chars in 1_usize..80,
    ) {
        let mut places: Vec<_> = text.char_indices().map(|(index, _)| index).collect();
        places.push(text.len());
        let mut cuts: Vec<_> = cuts.iter().map(|cut| places[cut.index(places.len())]).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let whole = sentences_of([text.as_str()], max_chars);
        prop_assert_eq!(&sentences_of(pieces, max_chars), &whole);
        let letters: Vec<_> = text.chars().map(String::from).collect();
        prop_assert_eq!(&sentences_of(letters.iter().map(String::as_str), max_chars), &whole);
    }

    #[test]
    fn every_letter_is_spoken_once_and_no_part_is_too_long(text in texts(), max_chars in 1_usize..80) {
        let letters = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).collect::<String>();
        for parts in [sentences_of([text.as_str()], max_chars), parts(&text, max_chars)] {
            prop_assert_eq!(letters(&parts.concat()), letters(&text));
            for part in &parts {
                prop_assert!(is_speakable(part) && part.chars().count() <= max_chars, "{:?}", part);
                prop_assert_eq!(part.trim(), part);
            }
        }
    }
}
