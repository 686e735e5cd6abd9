//! The sanitizer against a realistic program with faults put in, and against a brute-force oracle.

mod mutants;
mod oracle;

use crate::sanitize::wrap_if;
use crate::testing;

#[test]
fn the_environment_turns_it_on() {
    let name = |value: &str| {
        let (device, _) = testing::cpu();
        wrap_if(value.as_ref(), device).map(|device| format!("{device:?}").matches("sanitized").count())
    };
    assert_eq!(name("").unwrap(), 1);
    assert_eq!(name("0").unwrap(), 1);
    assert_eq!(name("1").unwrap(), 2);
    assert_eq!(
        name("yes").unwrap_err().to_string(),
        "cpu: LANEWAY_SANITIZE=yes is not supported: set it to 1 to check every call, or to 0"
    );
}
