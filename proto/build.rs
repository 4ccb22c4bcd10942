//! Generates messages and ttrpc services from proto/. Pure Rust: no protoc is needed.

use std::{error::Error, fs, path::PathBuf};
use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    generate(
        &out.join("lease"),
        &[
            "proto/nri/lease/v1/types.proto",
            "proto/nri/lease/v1/registry.proto",
            "proto/nri/lease/v1/admin.proto",
        ],
    )?;
    generate(&out.join("nri"), &["proto/nri/v1alpha1/nri.proto"])?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}

fn generate(out: &PathBuf, inputs: &[&str]) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(out)?;
    Codegen::new()
        .out_dir(out)
        .inputs(inputs)
        .include("proto")
        .rust_protobuf()
        .rust_protobuf_customize(ProtobufCustomize::default().gen_mod_rs(true))
        .customize(Customize {
            async_all: true,
            gen_mod: true,
            ..Default::default()
        })
        .run()?;
    // src/lib.rs includes mod.rs into a module of its own, where inner attributes are not allowed.
    let path = out.join("mod.rs");
    let modules: String = fs::read_to_string(&path)?
        .lines()
        .filter(|line| !line.starts_with("#!"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&path, modules)?;
    Ok(())
}
