//! Generates `messages.rs` and `descriptors.bin` beside the `.proto` files of the front door. Run
//! it after a change of one, from the root of the tree:
//! `cargo run --manifest-path server/proto/generate/Cargo.toml --target-dir target/generate`.

use prost::Message;
use std::path::Path;

/// Messages that are JSON answers too, with those that they define.
const JSON: [&str; 9] = [
    "ServerMetadataResponse",
    "ModelMetadataResponse",
    "ModelInput",
    "ModelOutput",
    "ModelConfig",
    "StatisticDuration",
    "InferStatistics",
    "ModelStatistics",
    "RepositoryIndexResponse.ModelIndex",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = ["open_inference.proto", "health.proto", "reflection.proto"];
    let set = protox::compile(files, [&folder])?;
    let mut shipped = set.clone();
    // Comments and lines, which no caller needs.
    shipped.file.iter_mut().for_each(|file| file.source_code_info = None);
    std::fs::write(folder.join("descriptors.bin"), shipped.encode_to_vec())?;

    let mut config = prost_build::Config::new();
    config.bytes(["."]).include_file("messages.rs").out_dir(&folder);
    for name in JSON {
        config.type_attribute(format!(".inference.{name}"), "#[derive(serde::Serialize)]");
    }
    let by_name = "#[serde(serialize_with = \"crate::proto::data_type_name\")]";
    for name in ["ModelInput", "ModelOutput"] {
        config.field_attribute(format!(".inference.{name}.data_type"), by_name);
    }
    config.compile_fds(set)?;
    Ok(())
}
