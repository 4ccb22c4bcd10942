//! The manual pages in `docs/man` are those of the programs as they are.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn pages(dir: &Path) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read_to_string(entry.path()).unwrap())
        })
        .collect()
}

#[test]
fn manual_pages_are_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_nri-lease"))
        .args(["man", "--dir"])
        .arg(dir.path())
        .status()
        .unwrap();
    assert!(made.success());
    let made = pages(dir.path());
    let kept = pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/man"));
    let names = |pages: &BTreeMap<String, String>| pages.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&made), names(&kept), "make man");
    for (name, page) in &made {
        assert_eq!(page, &kept[name], "{name} is out of date: make man");
    }
    assert!(made["nri-leased.8"].contains("check\\-config"));
    assert!(made["nri-lease-register.1"].contains("release\\-on\\-exit"));
}
