//! Shapes that steps are filled up to, where captures are made for buckets.

/// A prefill's bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PromptBucket {
    /// Prompts.
    pub(super) rows: usize,
    /// Rows of all prompts together.
    pub(super) tokens: usize,
}

/// Tokens of the smallest bucket: below it a pass of the stack takes no less time.
const FEWEST_TOKENS: usize = 16;
/// Rows that no prompt has fewer of in front of its last: a role, the shortest head, the text's beginning. It only
/// bounds the rows of a bucket: a step of shorter prompts takes a larger one.
const PROMPT_TOKENS: usize = 7;

/// Buckets of prefills of up to so many prompts and tokens, ascending: two to an octave, so that no more than a third
/// of a step is padding. The last has room for every step.
pub(super) fn prompt_buckets(most_rows: usize, most_tokens: usize) -> Vec<PromptBucket> {
    let octaves = std::iter::successors(Some(FEWEST_TOKENS), |tokens| tokens.checked_mul(2));
    octaves
        .flat_map(|tokens| [tokens, tokens + tokens / 2])
        .take_while(|tokens| *tokens < most_tokens)
        .map(|tokens| PromptBucket {
            rows: (tokens / PROMPT_TOKENS).min(most_rows),
            tokens,
        })
        .chain([PromptBucket {
            rows: most_rows,
            tokens: most_tokens,
        }])
        .collect()
}

/// The smallest of `buckets` with room for so many rows and tokens.
pub(super) fn bucket_of(buckets: &[PromptBucket], rows: usize, tokens: usize) -> PromptBucket {
    let fits = |bucket: &&PromptBucket| bucket.rows >= rows && bucket.tokens >= tokens;
    // No step is larger than the last bucket.
    buckets
        .iter()
        .find(fits)
        .copied()
        .unwrap_or(PromptBucket { rows, tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(most: (usize, usize), expected: &[(usize, usize)]) {
        let buckets = prompt_buckets(most.0, most.1);
        let shapes: Vec<_> = buckets
            .iter()
            .map(|bucket| (bucket.rows, bucket.tokens))
            .collect();
        assert_eq!(shapes, expected);
    }

    #[test]
    fn buckets_double_with_one_between_and_end_with_the_most() {
        check(
            (8, 100),
            &[(2, 16), (3, 24), (4, 32), (6, 48), (8, 64), (8, 96), (8, 100)],
        );
        check((8, 16), &[(8, 16)]);
        check((8, 5), &[(8, 5)]);
        assert_eq!(prompt_buckets(64, 4096).len(), 17);
    }

    #[test]
    fn a_step_takes_the_smallest_bucket_with_room_for_its_prompts_and_their_rows() {
        let buckets = prompt_buckets(8, 256);
        let of = |rows, tokens| {
            let bucket = bucket_of(&buckets, rows, tokens);
            (bucket.rows, bucket.tokens)
        };
        assert_eq!(of(1, 1), (2, 16));
        assert_eq!(of(1, 17), (3, 24));
        assert_eq!(of(5, 20), (6, 48), "many short prompts");
        assert_eq!(of(8, 256), (8, 256));
    }
}
