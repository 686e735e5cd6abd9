//! What a cubin says about its kernels: a reader of the ELF sections that describe them.
//!
//! The compiler writes the size of every parameter beside each kernel, so a launch can be held against the kernel it
//! names, whichever macro its source came out of.

use std::collections::BTreeMap;

/// One `__global__` function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Bytes of each parameter, in order.
    pub(crate) parameters: Vec<usize>,
    /// Threads that a block may have, where the source bounds it.
    pub(crate) max_threads: Option<usize>,
    /// Bytes of machine code.
    pub(crate) code_bytes: usize,
}

/// Section of a kernel's machine code, followed by its name.
const CODE: &str = ".text.";
/// Section of a kernel's description, followed by its name.
const INFO: &str = ".nv.info.";

/// Attribute formats: how many bytes follow.
const FORMAT_SIZED: u8 = 4;
/// Attribute: one parameter.
const PARAMETER: u8 = 0x17;
/// Attribute: the bounds of a block, along x, y and z.
const MAX_THREADS: u8 = 0x05;

/// Kernels by name.
///
/// # Errors
/// What is not as it should be in a cubin: the file is damaged.
pub(crate) fn kernels(cubin: &[u8]) -> Result<BTreeMap<String, Kernel>, String> {
    let mut kernels = BTreeMap::<String, Kernel>::new();
    let sections = sections(cubin).ok_or("not a whole ELF file")?;
    for (name, body) in &sections {
        if let Some(kernel) = name.strip_prefix(INFO) {
            let described = describe(body).ok_or_else(|| format!("{name}: not a list of attributes"))?;
            kernels.insert(kernel.to_owned(), described);
        }
    }
    for (name, body) in &sections {
        if let Some(kernel) = name.strip_prefix(CODE).and_then(|name| kernels.get_mut(name)) {
            kernel.code_bytes = body.len();
        }
    }
    match kernels.iter().find(|(_, kernel)| kernel.code_bytes == 0) {
        Some((name, _)) => Err(format!("{name} has no machine code")),
        None => Ok(kernels),
    }
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    bytes_at(bytes, at).map(|b| usize::from(u16::from_le_bytes(b)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(bytes_at(bytes, at)?)).ok()
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes_at(bytes, at)?)).ok()
}

/// Name and contents of every section of a little-endian ELF64 file.
fn sections(elf: &[u8]) -> Option<Vec<(String, &[u8])>> {
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, entry_bytes) = (u64_at(elf, 0x28)?, u16_at(elf, 0x3a)?);
    let (count, names_index) = (u16_at(elf, 0x3c)?, u16_at(elf, 0x3e)?);
    let header = |index: usize| elf.get(table.checked_add(index * entry_bytes)?..)?.get(..64);
    let body = |header: &[u8]| {
        // A section of type 8 (NOBITS) takes no space in the file.
        if u32_at(header, 4)? == 8 {
            return Some(&elf[..0]);
        }
        let (start, len) = (u64_at(header, 0x18)?, u64_at(header, 0x20)?);
        elf.get(start..start.checked_add(len)?)
    };
    let names = body(header(names_index)?)?;
    (0..count)
        .map(|index| {
            let header = header(index)?;
            let name = names.get(u32_at(header, 0)?..)?.split(|&byte| byte == 0).next()?;
            Some((String::from_utf8(name.to_vec()).ok()?, body(header)?))
        })
        .collect()
}

/// A kernel by its attributes.
fn describe(info: &[u8]) -> Option<Kernel> {
    let mut kernel = Kernel::default();
    let mut sizes = BTreeMap::new();
    let mut at = 0;
    while at < info.len() {
        let [format, attribute] = bytes_at(info, at)?;
        // Every other format has its value in the two bytes that hold the size here.
        let size = if format == FORMAT_SIZED {
            u16_at(info, at + 2)?
        } else {
            0
        };
        let value = info.get(at + 4..)?.get(..size)?;
        match (format, attribute) {
            // Symbol, ordinal (16 bits), offset (16 bits), and the size above bit 18 of the last word.
            (FORMAT_SIZED, PARAMETER) => {
                sizes.insert(u16_at(value, 4)?, u32_at(value, 8)? >> 18);
            }
            (FORMAT_SIZED, MAX_THREADS) => {
                kernel.max_threads = Some(u32_at(value, 0)? * u32_at(value, 4)? * u32_at(value, 8)?);
            }
            _ => {}
        }
        at += 4 + size;
    }
    kernel.parameters = sizes.into_values().collect();
    Some(kernel)
}
