//! The sanitizer against a realistic program with faults put in, and against a brute-force oracle.

mod mutants;
mod oracle;
