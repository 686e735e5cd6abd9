//! Sums of embedding rows.

/// One embedding table `[entries, width]`.
#[derive(Clone, Copy)]
pub(crate) enum Table<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

/// Add row `id` of `table` to `out`.
pub(crate) fn add_row(table: Table<'_>, id: usize, out: &mut [f32]) -> Result<(), String> {
    let width = out.len();
    let row = id * width..(id + 1) * width;
    let missing = |len: usize| format!("id {id} is past the {} entries of the table", len / width);
    match table {
        Table::F32(table) => {
            let row = table.get(row).ok_or_else(|| missing(table.len()))?;
            for (out, &x) in out.iter_mut().zip(row) {
                *out += x;
            }
        }
        Table::Bf16(table) => {
            let row = table.get(row).ok_or_else(|| missing(table.len()))?;
            for (out, &x) in out.iter_mut().zip(row) {
                *out += f32::from_bits(u32::from(x) << 16);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_rows_of_either_type_and_names_a_missing_entry() {
        let floats = [1.0, 2.0, 3.0, 4.0];
        let halves = floats.map(|x: f32| (x.to_bits() >> 16) as u16);
        for table in [Table::F32(&floats), Table::Bf16(&halves)] {
            let mut out = [10.0, 20.0];
            add_row(table, 1, &mut out).unwrap();
            assert_eq!(out, [13.0, 24.0]);
            let error = add_row(table, 2, &mut out).unwrap_err();
            assert!(error.contains("id 2 is past the 2 entries"), "{error}");
        }
    }
}
