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
